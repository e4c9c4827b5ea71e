"""Hosted linears with something beside their weight, against the formulas in float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.algorithms.fake_quantize import round_activation
from blockscale.checkpoint.linear import W4A4, W4A16, LowRank, QuantizedLinear, Residual, Scheme
from blockscale.formats.spec import NVFP4
from blockscale.formats.tensor import QuantizedTensor, decode, encode
from blockscale.host.linear import PackedLinear

FP32_ULP = 2.0**-24
N, K, RANK = 24, 96, 5


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def made(scheme: Scheme = W4A4, *, rank: int = 0, channels: list[int] | None = None) -> QuantizedLinear:
    weight = normal(N, K, seed=1) * 0.05
    q = encode(weight, NVFP4)
    scale = torch.tensor(4.0 / (6 * 256)) if scheme.needs_input_scale else None
    low_rank = None
    if rank:
        low_rank = LowRank(normal(N, rank, seed=2).bfloat16() * 0.1, normal(rank, K, seed=3).bfloat16() * 0.1)
    residual = None
    if channels:
        chosen = torch.tensor(channels, dtype=torch.int32)
        residual = Residual(chosen, encode(weight[:, chosen], NVFP4, global_scale=q.global_scale))
    return QuantizedLinear(scheme, q, scale, None, low_rank, residual)


def exact(q: QuantizedTensor) -> Tensor:
    """float64 without a rounding by the global scale."""
    assert q.global_scale is not None
    return decode(replace(q, global_scale=torch.tensor(1.0))).double() * q.global_scale.double()


def rounded(x: Tensor, linear: QuantizedLinear, method: ActivationScale) -> Tensor:
    values, factor = round_activation(x, NVFP4, linear.input_global_scale, method)
    return values.double() * factor.double()


def expected(
    x: Tensor, linear: QuantizedLinear, method: ActivationScale, *, is_emulating: bool
) -> tuple[Tensor, Tensor]:
    """float64 y, and the sum of magnitudes that its rounding is bounded by."""
    is_rounding = is_emulating and linear.scheme.activation is not None
    seen, weight = (rounded(x, linear, method) if is_rounding else x.double()), exact(linear.weight)
    y, size = seen @ weight.T, seen.abs() @ weight.abs().T
    if linear.residual is not None and is_rounding:
        channels = linear.residual.channels.long()
        error = (x.double() - seen)[:, channels].float()
        again, columns = rounded(error, linear, method), exact(linear.residual.weight)
        y, size = y + again @ columns.T, size + again.abs() @ columns.abs().T
    if linear.low_rank is not None:
        up, down = linear.low_rank.up.double(), linear.low_rank.down.double()
        y, size = y + x.double() @ down.T @ up.T, size + x.double().abs() @ down.abs().T @ up.abs().T
    return y, size


CHANNELS = {
    "none": None,
    "a block": list(range(15, -1, -1)),
    "out of order": [90, 3, 95, 0, 17, 33, 64, 5, 8, 71, 40, 41, 2, 60, 59, 77],
    "all of them": list(torch.randperm(K, generator=torch.Generator().manual_seed(9)).tolist()),
}


@pytest.mark.parametrize("is_emulating", [True, False])
@pytest.mark.parametrize("method", ActivationScale, ids=lambda m: m.value)
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("rank", [0, 1, RANK])
@pytest.mark.parametrize("rows", [1, 7])
def test_the_formulas(rank: int, channels: str, method: ActivationScale, is_emulating: bool, rows: int) -> None:
    linear, x = made(rank=rank, channels=CHANNELS[channels]), normal(rows, K)
    y = PackedLinear(linear, None, is_emulating=is_emulating, activation_scale=method)(x)
    wanted, size = expected(x, linear, method, is_emulating=is_emulating)
    bound = (2 * (2 * K + RANK) + 8) * FP32_ULP * size
    assert y.dtype == torch.float32
    assert ((y.double() - wanted).abs() <= bound).all()


def test_residual_channels_are_nothing_where_inputs_are_not_rounded() -> None:
    linear, x = made(channels=CHANNELS["a block"]), normal(3, K)
    plain = replace(linear, residual=None)
    unrounded = [PackedLinear(each, None, is_emulating=False)(x) for each in (linear, plain)]
    assert torch.equal(*unrounded)
    assert not torch.equal(*(PackedLinear(each, None, is_emulating=True)(x) for each in (linear, plain)))


def test_all_channels_again_bring_the_output_nearer() -> None:
    x, linear = normal(32, K), made(channels=CHANNELS["all of them"])
    right = x.double() @ exact(linear.weight).T
    errors = [
        (PackedLinear(each, None, is_emulating=True)(x).double() - right).norm()
        for each in (linear, replace(linear, residual=None))
    ]
    assert errors[0] < 0.4 * errors[1]


def test_a_branch_in_16_bit_weights_only() -> None:
    linear, x = made(W4A16, rank=RANK), normal(3, K)
    assert linear.low_rank is not None
    y = PackedLinear(linear, None, is_emulating=True)(x)
    whole = exact(linear.weight) + linear.low_rank.up.double() @ linear.low_rank.down.double()
    assert torch.allclose(y.double(), x.double() @ whole.T, rtol=1e-5, atol=1e-5)


def test_the_branch_sees_scaled_inputs_and_the_bias_comes_last() -> None:
    x, bias = normal(4, K), normal(N, seed=7)
    pre = torch.rand(K, generator=torch.Generator().manual_seed(4)) + 0.5
    linear = made(rank=RANK, channels=CHANNELS["out of order"])
    y = PackedLinear(replace(linear, pre_quant_scale=pre), bias, is_emulating=True)(x)
    wanted, _ = expected(x * pre, linear, ActivationScale.AMAX, is_emulating=True)
    assert torch.allclose(y.double(), wanted + bias.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_emulating", [True, False])
def test_16_bit_inputs(dtype: torch.dtype, is_emulating: bool) -> None:
    x, linear = normal(8, K).to(dtype), made(rank=RANK, channels=CHANNELS["a block"])
    y = PackedLinear(linear, None, is_emulating=is_emulating)(x)
    assert y.dtype == dtype
    wanted, _ = expected(x.float(), linear, ActivationScale.AMAX, is_emulating=is_emulating)
    assert (y.double() - wanted).norm() < 0.01 * wanted.norm()


def test_leading_dimensions_stay() -> None:
    x, layer = normal(2, 3, K), PackedLinear(made(rank=2, channels=CHANNELS["a block"]), None, is_emulating=True)
    assert torch.allclose(layer(x).view(6, N), layer(x.view(6, K)), rtol=1e-5, atol=1e-6)


def test_moving_takes_all_of_it_along_and_casts_nothing() -> None:
    linear = made(rank=RANK, channels=CHANNELS["a block"])
    layer = torch.nn.Sequential(PackedLinear(linear, None, is_emulating=True)).to(torch.float16)[0]
    assert isinstance(layer, PackedLinear)
    for found in (layer.linear, linear.to("cpu")):
        assert found.low_rank is not None
        assert found.residual is not None
        assert found.low_rank.up.dtype == found.low_rank.down.dtype == torch.bfloat16
        assert found.residual.channels.dtype == torch.int32
        assert found.residual.weight.block_scale.dtype == torch.float8_e4m3fn
    meta = linear.to("meta")
    assert meta.low_rank is not None
    assert meta.residual is not None
    parts = (meta.low_rank.up, meta.low_rank.down, meta.residual.channels, meta.residual.weight.packed)
    assert all(part.is_meta for part in parts)


def test_bytes_count_what_lies_beside() -> None:
    codes = N * K // 2 + N * K // 16 + 4
    assert made().num_bytes == codes
    assert made(rank=RANK).num_bytes == codes + 2 * RANK * (N + K)
    assert made(channels=CHANNELS["a block"]).num_bytes == codes + 4 * 16 + N * 16 // 2 + N
