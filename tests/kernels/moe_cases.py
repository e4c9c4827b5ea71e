"""Layers of experts to test with, and the layer in float64 from what the bits mean."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockscale.formats.spec import Format
from blockscale.formats.tensor import decode, encode
from blockscale.kernels.experts import SILU, GatedActivation
from blockscale.kernels.prepare import PreparedWeight, from_row_major, row_major


@dataclass(frozen=True)
class Layer:
    gate_up: PreparedWeight  # [E, 2 I, K]
    down: PreparedWeight  # [E, N, I]
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: GatedActivation


def make_experts(shape: tuple[int, int, int], fmt: Format, seed: int, num_scales: int = 1) -> PreparedWeight:
    """A random stack [E, N, K], each expert's global scale its own."""
    generator = torch.Generator().manual_seed(seed)
    weight = row_major(encode(torch.randn(shape, generator=generator) / shape[-1] ** 0.5, fmt))
    if fmt.has_global_scale:
        size = (shape[0],) if num_scales == 1 else (shape[0], num_scales)
        factor = torch.rand(size, generator=generator) + 0.5
        weight = replace(weight, global_scale=(weight.global_scale.mean() * factor).contiguous())
    return weight


def make_layer(
    num_experts: int,
    k: int,
    intermediate: int,
    n: int,
    fmt: Format,
    *,
    activation: GatedActivation = SILU,
    has_bias: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    num_scales: int = 1,
    seed: int = 0,
) -> Layer:
    generator = torch.Generator().manual_seed(seed + 100)
    biases = [
        torch.randn(num_experts, rows, generator=generator).to(dtype) if has_bias else None
        for rows in (2 * intermediate, n)
    ]
    gate_up = make_experts((num_experts, 2 * intermediate, k), fmt, seed, num_scales)
    return Layer(gate_up, make_experts((num_experts, n, intermediate), fmt, seed + 1), *biases, activation)


def make_choices(
    num_tokens: int, top_k: int, num_experts: int, kind: str = "balanced", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """topk_ids [T, top_k] and topk_weights, of one kind: balanced, skewed, one, repeated, holes."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    if kind == "skewed":
        scores[:, : max(1, num_experts // 4)] += 0.9
    ids = scores.argsort(dim=1, descending=True)[:, :top_k]
    if kind == "one":
        ids = torch.full((num_tokens, top_k), num_experts - 1)
    if kind == "repeated":
        ids = torch.randint(0, num_experts, (num_tokens, top_k), generator=generator)
    if kind == "holes":
        ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, torch.tensor([-1]), ids)
        ids[-1] = num_experts  # a token without any expert
    return ids, torch.rand(num_tokens, top_k, generator=generator)


def weight_values(weight: PreparedWeight) -> Tensor:
    """float64 [E, N, K] from the formats' own decoding."""
    values = []
    plain = from_row_major(replace(weight, global_scale=torch.ones(weight.shape[0], device=weight.device)))
    for expert in range(weight.shape[0]):
        scale = torch.ones((), device=weight.device) if weight.format.has_global_scale else None
        one = replace(
            plain,
            packed=plain.packed[expert],
            block_scale=plain.block_scale[expert],
            global_scale=scale,
            shape=weight.shape[1:],
        )
        values.append(decode(one).double())
    return torch.stack(values)


def _products(a: Tensor, values: Tensor, ids: Tensor) -> Tensor:
    """[P, N] of rows `a` [P, K] with the experts' values [E, N, K] that `ids` [P] name; float64."""
    out = a.new_empty(a.shape[0], values.shape[1])
    for expert in range(values.shape[0]):
        mine = (ids == expert).nonzero().flatten()
        out[mine] = a[mine] @ values[expert].T
    return out


def reference(layer: Layer, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    """y float64 [T, N], and the sum of the magnitudes of what was added for each of its elements.

    Only h is rounded, to the dtype of x, as every implementation does.
    """
    num_tokens, top_k = topk_ids.shape
    act, num_experts = layer.activation, layer.gate_up.shape[0]
    flat, pair_weights = topk_ids.flatten(), topk_weights.double().flatten()[:, None]
    valid = (flat >= 0) & (flat < num_experts)
    ids = flat.clamp(0, num_experts - 1)

    def halves(both: Tensor) -> tuple[Tensor, Tensor]:
        return (both[:, 0::2], both[:, 1::2]) if act.is_interleaved else tuple(both.chunk(2, dim=1))

    gate, up = halves(_products(x.double().repeat_interleave(top_k, 0), weight_values(layer.gate_up), ids))
    scales = layer.gate_up.global_scale.double().reshape(num_experts, -1)[ids]
    gate, up = gate * scales[:, :1], up * scales[:, -1:]
    if layer.gate_up_bias is not None:
        gate_bias, up_bias = halves(layer.gate_up_bias.double()[ids])
        gate, up = gate + gate_bias, up + up_bias
    gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
    h = (gate * torch.sigmoid(act.alpha * gate) * (up + act.beta)).to(x.dtype).double()
    values = weight_values(layer.down) * layer.down.global_scale.double()[:, None, None]
    bias = 0.0 if layer.down_bias is None else layer.down_bias.double()[ids]
    out = torch.where(valid[:, None], (_products(h, values, ids) + bias) * pair_weights, 0.0)
    size = torch.where(valid[:, None], (_products(h.abs(), values.abs(), ids) + abs(bias)) * pair_weights.abs(), 0.0)
    return tuple(part.view(num_tokens, top_k, -1).sum(1) for part in (out, size))  # type: ignore[return-value]


def assert_close(y: Tensor, layer: Layer, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
    """Each element within one rounding of y and, as h may round the other way, one of every product; and in all
    within one rounding."""
    expected, size = reference(layer, x, topk_ids, topk_weights)
    ulp = 2.0**-8 if x.dtype == torch.bfloat16 else 2.0**-11
    error = (y.double() - expected).abs()
    assert y.dtype == x.dtype
    assert torch.isfinite(y).all()
    assert (error <= ulp * (expected.abs() + size) + 2.0**-24).all()
    assert error.norm() <= ulp * expected.norm()
