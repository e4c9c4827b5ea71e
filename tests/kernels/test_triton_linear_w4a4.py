"""W4A4 emulated: the operands are the bytes of `formats`, and the product of those is exact."""

import pytest
import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats import nvfp4
from blockscale.formats.spec import MXFP4, NVFP4
from blockscale.formats.tensor import encode
from blockscale.kernels.prepare import PreparedWeight, row_major
from blockscale.kernels.triton import linear_w4a4 as compiled

from .compiled import compile_triton
from .interpreter import interpreted

kernels = interpreted("blockscale.kernels.triton.linear_w4a4")
EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}


def made(n: int, k: int) -> PreparedWeight:
    return row_major(encode(torch.randn(n, k, generator=torch.Generator().manual_seed(0)), NVFP4))


def activations(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_exact(
    y: Tensor, x: Tensor, weight: PreparedWeight, scale: Tensor | None, bias: Tensor | None = None
) -> None:
    """y is the float64 product of what `formats` decodes, within a rounding of the output and K of fp32."""
    q = encode(x.reshape(-1, x.shape[-1]), NVFP4, global_scale=scale)
    left = nvfp4.decode_unscaled(q.packed, q.block_scale).double()
    right = nvfp4.decode_unscaled(weight.packed, weight.block_scale.view(torch.float8_e4m3fn)).double()
    alpha = (q.global_scale * weight.global_scale).double()
    offset = 0.0 if bias is None else bias.double()
    want = (left @ right.T * alpha + offset).view(y.shape)
    terms = (left.abs() @ right.abs().T * alpha).view(y.shape) + want.abs()
    assert y.dtype == x.dtype
    assert ((y.double() - want).abs() <= want.abs() * EPSILON[x.dtype] + terms * x.shape[-1] * 2.0**-24 + 2e-8).all()


@pytest.mark.parametrize("dtype", list(EPSILON))
@pytest.mark.parametrize(("n", "k"), [(5, 16), (70, 144), (64, 256)])
@pytest.mark.parametrize("static", [None, 0.003])
def test_operands_are_those_of_formats(n: int, k: int, dtype: torch.dtype, static: float | None) -> None:
    weight, x, bias = made(n, k), activations(3, 7, k, dtype=dtype), activations(n, dtype=torch.float32)
    scale = None if static is None else torch.tensor(static)
    assert_exact(kernels.linear(x, weight, bias, scale), x, weight, scale, bias)


def test_exactly_representable_sums_come_out_exact() -> None:
    weight = made(70, 128)
    weight.block_scale.fill_(0x38)  # 1.0
    weight.global_scale.fill_(0.5)
    # six in each block and a global scale of one: block scales are 1, and codes hold the values
    x = torch.randint(-3, 4, (9, 128), generator=torch.Generator().manual_seed(2)).bfloat16()
    x[:, ::16] = 6.0
    scale = torch.tensor(1.0)
    values = nvfp4.decode_unscaled(weight.packed, weight.block_scale.view(torch.float8_e4m3fn)).double()
    y = kernels.linear(x.float(), weight, None, scale)
    assert torch.equal(y.double(), x.double() @ values.T * 0.5)


def test_strided_rows_give_what_their_copy_gives() -> None:
    weight, wide = made(65, 96), activations(2, 5, 192)
    for x in (wide[..., 96:], wide[:, ::2, :96], wide[..., ::2]):
        assert torch.equal(kernels.linear(x, weight), kernels.linear(x.contiguous(), weight))


def test_nan_stays_in_its_row() -> None:
    weight, x = made(66, 96), activations(4, 96)
    clean = kernels.linear(x, weight, None, torch.tensor(0.002))
    x[1, 70] = torch.nan
    y = kernels.linear(x, weight, None, torch.tensor(0.002))
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2, 3]], clean[[0, 2, 3]])


def test_zero_rows_and_no_rows() -> None:
    weight = made(66, 96)
    assert (kernels.linear(torch.zeros(3, 96, dtype=torch.bfloat16), weight) == 0).all()
    assert kernels.linear(activations(2, 0, 96), weight).shape == (2, 0, 66)


def test_the_whole_output_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = made(70, 80), activations(19, 80)

    def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        whole = real(shape, dtype=dtype, device=device)
        whole.view(torch.uint8).fill_(0x7F)  # NaN in fp8, huge in 16 bits
        return whole

    real = torch.empty
    want = kernels.linear(x, weight, None, torch.tensor(0.002))
    monkeypatch.setattr(torch, "empty", poisoned)
    assert torch.equal(kernels.linear(x, weight, None, torch.tensor(0.002)), want)


def test_operands_that_do_not_fit_are_refused() -> None:
    weight, x = made(70, 96), activations(4, 96)
    mx = row_major(encode(torch.randn(70, 96), MXFP4))
    for bad_x, bad_weight, scale in (
        (x[:, :64], weight, None),
        (x.int(), weight, None),
        (x, mx, None),
        (x, weight, torch.tensor([1.0, 2.0])),
    ):
        with pytest.raises(FormatError):
            kernels.linear(bad_x, bad_weight, None, scale)


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_activations_decode_without_spills(arch: str) -> None:
    signature = {"groups": "*i64", "scales": "*u8", "out": "*bf16"} | dict.fromkeys(
        ("M", "num_groups", "out_stride"), "i32"
    )
    constants = {"BLOCK_M": 16, "GROUPS": 16}
    aligned = ("groups", "scales", "out", "num_groups", "out_stride")
    code = compile_triton(compiled._decode_rows, signature, constants, arch, divisible_by_16=aligned)
    assert code.num_spills == 0
    assert code.registers <= 128
