"""Weights in the layouts of kernels: without a copy where the order stays, and refused where they cannot be read."""

import pytest
import torch

from blockscale.errors import FormatError
from blockscale.formats.spec import FP8, MXFP4, NVFP4, Format
from blockscale.formats.tensor import QuantizedTensor, encode
from blockscale.kernels import linears
from blockscale.kernels.linears import prepare
from blockscale.kernels.prepare import Layout, from_row_major, row_major
from blockscale.kernels.reference.linear import decoded_rows, linear_w4a16
from blockscale.kernels.select import Op


def quantized(fmt: Format, *shape: int) -> QuantizedTensor:
    return encode(torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16(), fmt)


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4])
def test_the_order_of_checkpoints_is_no_copy(fmt: Format) -> None:
    q = quantized(fmt, 24, 64)
    weight = row_major(q)
    assert weight.packed.data_ptr() == q.packed.data_ptr()
    assert weight.block_scale.data_ptr() == q.block_scale.data_ptr()
    assert (weight.n, weight.k, weight.dtype) == (24, 64, torch.bfloat16)
    assert weight.num_bytes == q.num_bytes + (0 if fmt.has_global_scale else 4)
    back = from_row_major(weight)
    assert torch.equal(back.dequantize(), q.dequantize())
    assert back.block_scale.dtype == q.block_scale.dtype


def test_a_stack_has_a_global_scale_each() -> None:
    q = quantized(NVFP4, 3, 16, 32)
    assert row_major(q).global_scale.shape == (3,)
    assert torch.equal(row_major(q).global_scale, q.global_scale.expand(3))
    assert row_major(quantized(MXFP4, 3, 16, 32)).global_scale.tolist() == [1.0] * 3


def test_what_no_kernel_reads_is_refused() -> None:
    with pytest.raises(FormatError, match="no kernels for weights in fp8"):
        row_major(quantized(FP8, 16, 32))
    with pytest.raises(FormatError, match=r"a weight is \[N, K\]"):
        row_major(quantized(NVFP4, 32))
    q = quantized(NVFP4, 16, 32)
    short = QuantizedTensor(q.format, q.packed[:8], q.block_scale, q.global_scale, q.shape, q.dtype)
    with pytest.raises(FormatError, match=r"packed is \[8, 16\]"):
        row_major(short)
    odd = QuantizedTensor(q.format, q.packed[:, :4], q.block_scale[:, :1], q.global_scale, (16, 8), q.dtype)
    with pytest.raises(FormatError, match="K = 8"):
        row_major(odd)


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4])
@pytest.mark.parametrize("layout", [Layout.ROW_MAJOR, Layout.FRAGMENTS])
def test_a_layout_keeps_every_value(fmt: Format, layout: Layout) -> None:
    q = quantized(fmt, 72, 96)
    weight = linears.PREPARE[layout](row_major(q))
    assert weight.layout is layout
    values = torch.cat([part for _, part in decoded_rows(weight)]) * weight.global_scale
    assert torch.equal(values, q.dequantize(torch.float32))


def test_memory_is_given_back_where_the_layout_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 96).bfloat16()
    q = quantized(NVFP4, 72, 96)
    expected = linear_w4a16(x, row_major(q))
    kept = prepare(q, layout=Layout.ROW_MAJOR, consume=True)
    assert q.packed.untyped_storage().nbytes() == 72 * 48
    assert torch.equal(linear_w4a16(x, kept), expected)
    moved = prepare(q, layout=Layout.FRAGMENTS, consume=True)
    assert q.packed.untyped_storage().nbytes() == 0
    assert q.block_scale.untyped_storage().nbytes() == 0
    assert torch.equal(linear_w4a16(x, moved), expected)


def test_the_layout_is_that_of_the_op_on_the_device() -> None:
    q = quantized(NVFP4, 32, 64)
    layout = prepare(q).layout
    assert layout is linears.best_layout(Op.LINEAR_W4A16, linears.describe("cpu"), row_major(q))
    assert layout in (Layout.CPU, Layout.ROW_MAJOR)
