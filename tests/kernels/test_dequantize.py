"""Whole weights from the fragment-ordered layout to 16 bits and to E4M3, and what is refused."""

import pytest
import torch

from blockscale.errors import FormatError
from blockscale.formats.fp8 import DTYPES
from blockscale.formats.nvfp4 import decode_unscaled
from blockscale.formats.spec import E4M3, MXFP4, NVFP4, Format
from blockscale.formats.tensor import QuantizedTensor, encode
from blockscale.kernels.cuda import linear_w4a8
from blockscale.kernels.cuda.dequantize import dequantize, rows_to_e4m3, to_e4m3
from blockscale.kernels.layouts import to_fragments
from blockscale.kernels.prepare import row_major
from blockscale.kernels.reference.linear import linear_w4a8 as reference_w4a8

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
needs_fp8 = pytest.mark.skipif(not HAS_FP8, reason="needs a GPU of compute capability 8.9")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def weight(n: int, k: int, fmt: Format = NVFP4, device: str = "cuda") -> QuantizedTensor:
    values = torch.randn(n, k, generator=torch.Generator().manual_seed(n))
    values[0, :32] = 0.0
    values[n // 2] = 0.0
    return encode(values.bfloat16().to(device), fmt)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4])
@pytest.mark.parametrize(("n", "k"), [(517, 1056), (32, 128), (33, 32), (1, 160)])
def test_dequantize_is_bit_equal(n: int, k: int, fmt: Format, dtype: torch.dtype) -> None:
    q = weight(n, k, fmt)
    out = torch.full((n, k), float("nan"), dtype=dtype, device="cuda")
    assert dequantize(to_fragments(row_major(q)), dtype, out) is out
    assert torch.equal(out, q.dequantize(dtype))


@needs_fp8
@pytest.mark.parametrize(("n", "k"), [(517, 1056), (16, 128), (33, 16)])
def test_e4m3_weights_are_the_rounded_values(n: int, k: int) -> None:
    q = weight(n, k)
    codes, row_scale = to_e4m3(to_fragments(row_major(q)), n + 3)
    values = decode_unscaled(q.packed, q.block_scale)
    amax = values.abs().amax(1)
    wanted = torch.where(amax == 0, 1.0, amax / torch.full_like(amax, E4M3.max))
    assert torch.equal(row_scale[:n], wanted)
    assert (row_scale[n:] == 1).all()
    assert torch.equal(codes[:n].float(), (values / wanted[:, None]).to(DTYPES[E4M3]).float())
    assert (codes[n:].float() == 0).all()


@needs_fp8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "k"), [(300, 1024), (1, 16), (3, 20000)])
def test_rows_to_e4m3(m: int, k: int, dtype: torch.dtype) -> None:
    x = torch.randn(m, k + 8, device="cuda").to(dtype)[:, :k]
    x[0, : k // 2] = 0.0
    codes, scale = rows_to_e4m3(x)
    amax = x.float().abs().amax(1, keepdim=True)
    wanted = amax / torch.full_like(amax, E4M3.max)
    assert torch.equal(scale, wanted)
    assert torch.equal(codes.float(), (x.float() / wanted).to(DTYPES[E4M3]).float())


@needs_fp8
def test_w4a8_agrees_with_the_reference() -> None:
    q = weight(520, 1024)
    tiles = to_fragments(row_major(q))
    x, bias = torch.randn(2, 70, 1024, device="cuda").bfloat16(), torch.randn(520, device="cuda")
    wanted = reference_w4a8(x, tiles, bias).double()
    for given in (tiles, linear_w4a8.prepare(tiles)):
        y = linear_w4a8.linear(x, given, bias).double()
        # the same operands: sums and y are rounded, and FP8 tensor cores keep about 14 bits of a sum
        assert (y - wanted).norm() <= 2**-8 * wanted.norm()
    exact = x.double() @ q.dequantize(torch.float32).double().T + bias
    assert 2**-7 < (wanted - exact).norm() / exact.norm() < 2**-4  # what being E4M3 costs


def test_what_is_refused() -> None:
    q = weight(32, 128, device="cpu")
    x = torch.zeros(4, 128, dtype=torch.bfloat16)
    with pytest.raises(FormatError, match="row_major"):
        dequantize(row_major(q))
    with pytest.raises(FormatError, match="is on cpu"):
        dequantize(to_fragments(row_major(q)))
    with pytest.raises(FormatError, match="float32"):
        rows_to_e4m3(x.float())
    with pytest.raises(FormatError, match="K = 24"):
        rows_to_e4m3(x[:, :24])
    with pytest.raises(FormatError, match="no E4M3"):
        rows_to_e4m3(x)
    with pytest.raises(FormatError, match=r"\[4, 64\]"):
        linear_w4a8.linear(x[:, :64], to_fragments(row_major(q)))
    with pytest.raises(FormatError, match="is on cpu"):
        linear_w4a8.linear(x, to_fragments(row_major(q)))
