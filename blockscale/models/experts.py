"""A layer's routed experts - stacks in four or 16 bits, or linears one by one - and how tokens run through them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from blockscale.kernels.experts import SILU, GatedActivation
from blockscale.kernels.ops.moe import moe_w4a16
from blockscale.kernels.prepare import PreparedWeight

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PackedExperts:
    """Row-major stacks in NVFP4 or MXFP4, for `kernels.ops.moe`.

    gate_up  [E, 2 H, K]
    down     [E, N, H]
    biases   [E, 2 H] and [E, N] in fp32 or the dtype of x, or None
    """

    gate_up: PreparedWeight
    down: PreparedWeight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: GatedActivation = SILU

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[T, N] like x [T, K]: tokens through the experts `ids` [T, top_k], weighted and summed."""
        return moe_w4a16(
            x,
            ids,
            weights,
            self.gate_up,
            self.down,
            activation=self.activation,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
        )


@dataclass(frozen=True)
class PlainExperts:
    """Stacks in the dtype of x: gate_up [E, 2 H, K], down [E, N, H], biases [E, 2 H] and [E, N] of any dtype."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: GatedActivation = SILU

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """As `PackedExperts`; on a GPU without a word to the host, where bf16 has grouped products."""
        if x.is_cuda:
            return self._grouped(x, ids, weights)

        def run(expert: int, rows: Tensor) -> Tensor:
            first = functional.linear(rows, self.gate_up[expert])
            inner = gated(_biased(first, self.gate_up_bias, expert), self.activation).to(x.dtype)
            return _biased(functional.linear(inner, self.down[expert]), self.down_bias, expert)

        return one_by_one(x, ids, weights, len(self.gate_up), run)

    def _grouped(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Pairs (token, choice) in the order of experts, one grouped product a projection."""
        num_tokens, top_k = ids.shape
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        expert = flat[order]
        counts = torch.zeros(len(self.gate_up), dtype=torch.int32, device=x.device)
        ends = counts.index_add_(0, expert, torch.ones_like(expert, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
        first = functional.grouped_mm(x[order // top_k], self.gate_up.transpose(-1, -2), offs=ends).float()
        if self.gate_up_bias is not None:
            first = first + self.gate_up_bias[expert].float()
        inner = gated(first, self.activation).to(x.dtype)
        out = functional.grouped_mm(inner, self.down.transpose(-1, -2), offs=ends).float()
        if self.down_bias is not None:
            out = out + self.down_bias[expert].float()
        pairs = torch.empty_like(out)
        pairs[order] = out
        return (pairs.view(num_tokens, top_k, -1) * weights.float().unsqueeze(-1)).sum(1).to(x.dtype)


@dataclass(frozen=True)
class SeparateExperts:
    """A few linears an expert: whatever cannot be stacked - FP8, rounded inputs, branches, a mixture of formats.

    It waits for the device to learn which experts were chosen, so it cannot be captured in a graph.

    first  of each expert: the linears whose results stand beside each other as [.., 2 H]
    """

    first: tuple[tuple[Product, ...], ...]
    down: tuple[Product, ...]
    activation: GatedActivation = SILU

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """As `PackedExperts`."""

        def run(expert: int, rows: Tensor) -> Tensor:
            parts = [linear(rows) for linear in self.first[expert]]
            both = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
            return self.down[expert](gated(both.float(), self.activation).to(x.dtype)).float()

        return one_by_one(x, ids, weights, len(self.down), run)


Experts = PackedExperts | PlainExperts | SeparateExperts


def gated(h: Tensor, activation: GatedActivation) -> Tensor:
    """fp32 [T, 2 H] of gate and up -> [T, H], by the formula of `GatedActivation`."""
    gate, up = (h[:, 0::2], h[:, 1::2]) if activation.is_interleaved else h.chunk(2, dim=-1)
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.beta)


def one_by_one(
    x: Tensor, ids: Tensor, weights: Tensor, num_experts: int, run: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """[T, N] like x: the chosen experts in the order of their numbers, so that a token's sum does not depend on the
    others; sums in fp32. `run`: (expert, rows of x) -> fp32 rows."""
    out: Tensor | None = None
    for expert in ids.unique().tolist():
        if not 0 <= expert < num_experts:  # a place that pads a batch
            continue
        token, choice = torch.where(ids == expert)
        y = run(expert, x[token]) * weights[token, choice, None].float()
        out = torch.zeros(len(x), y.shape[1], device=x.device) if out is None else out
        out.index_add_(0, token, y)
    return torch.zeros_like(x) if out is None else out.to(x.dtype)


def _biased(y: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    return y.float() if bias is None else y.float() + bias[expert].float()
