"""The repaired interpreter computes what the hardware does."""

import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from .interpreter import bf16_to_fp32, fp32_to_bf16, interpret, interpreted


def _copy(x, y, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))


def _multiply(a, b, y, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(y + i, tl.load(a + i) * tl.load(b + i))


def _dot(a, b, y, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]
    tl.store(y + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def _sum_blocks(x, y, count, SIZE: tl.constexpr):
    total = tl.zeros([SIZE], tl.float32)
    for block in range(count):
        total += tl.load(x + block * SIZE + tl.arange(0, SIZE))
    tl.store(y, tl.sum(total, axis=0))


def _largest(x, y, SIZE: tl.constexpr):
    values = tl.load(x + tl.arange(0, SIZE))
    tl.store(y, tl.max(values, axis=0))
    tl.store(y + 1, tl.max(tl.maximum(values, 1.0), axis=0))
    tl.store(y + 2, tl.min(tl.clamp(values, -2.0, 2.0), axis=0))


def _fused(x, y, z, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.fma(tl.load(x + i), tl.load(y + i), tl.load(z + i)))


def all_bf16() -> Tensor:
    """Every bf16 bit pattern."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def test_bf16_keeps_its_value_on_the_way_to_fp32() -> None:
    y = torch.empty(65536)
    interpret(_copy)[(1,)](all_bf16(), y, SIZE=65536)
    assert torch.equal(y.view(torch.int32), all_bf16().float().view(torch.int32))


def test_fp32_rounds_to_bf16_as_torch_does() -> None:
    bits = torch.randint(-(2**31), 2**31, (65536,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    ties = (all_bf16().view(torch.int16).long() << 16) | 0x8000
    x = torch.cat([bits, ties]).to(torch.int32).view(torch.float32)
    y = torch.empty(x.numel(), dtype=torch.bfloat16)
    interpret(_copy)[(1,)](x, y, SIZE=x.numel())
    expected, is_nan = x.to(torch.bfloat16), x.isnan()
    assert y[is_nan].isnan().all()
    assert torch.equal(y[~is_nan].view(torch.int16), expected[~is_nan].view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_rounds_to_even_and_saturates(dtype: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite()].sort().values
    x = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor([1e9, -1e9])])
    x = torch.cat([x, x.new_zeros(1024 - x.numel())])
    y = torch.empty(1024, dtype=dtype)
    interpret(_copy)[(1,)](x, y, SIZE=1024)
    largest = torch.finfo(dtype).max
    assert torch.equal(y.float(), x.clamp(-largest, largest).to(dtype).float())


def test_products_of_bf16_are_of_values_subnormals_too() -> None:
    a = torch.tensor([1.5, 2.0**-127, 2.0**-130, float("inf")] * 4, dtype=torch.bfloat16)
    b = torch.tensor([2.5, 2.0**120, 2.0**3, 1.0] * 4, dtype=torch.bfloat16)
    y = torch.empty(16, dtype=torch.bfloat16)
    interpret(_multiply)[(1,)](a, b, y, SIZE=16)
    assert torch.equal(y.float(), (a.float() * b.float()).bfloat16().float())
    assert y[1] == 2.0**-7
    assert y[2] == 2.0**-127


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_multiplies_values(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-8, 9, (16, 16), generator=generator).to(dtype) / 4 for _ in range(2))
    y = torch.empty(16, 16)
    interpret(_dot)[(1,)](a, b, y, SIZE=16)
    assert torch.equal(y, a.float() @ b.float())


def test_range_takes_an_argument_and_sums_are_interpreted() -> None:
    x, y = torch.arange(96.0), torch.empty(1)
    interpret(_sum_blocks)[(1,)](x, y, 3, SIZE=32)
    assert y.item() == x.sum().item()


def test_nan_loses_against_a_number_in_max() -> None:
    x, y = torch.tensor([float("nan"), -3.0, 0.5, float("nan")]), torch.empty(3)
    interpret(_largest)[(1,)](x, y, SIZE=4)
    assert y.tolist() == [0.5, 1.0, -2.0]


def test_fma_rounds_once() -> None:
    x = torch.full((16,), 1 + 2.0**-12)
    out = torch.empty(16)
    interpret(_fused)[(1,)](x, x, -torch.full((16,), 1 + 2.0**-11), out, SIZE=16)
    assert torch.equal(out, torch.full((16,), 2.0**-24))


def test_a_module_is_interpreted_in_a_copy_and_the_library_stays_compiled() -> None:
    import blockscale.kernels.triton.decode as compiled

    copy = interpreted("blockscale.kernels.triton.decode")
    assert copy is interpreted("blockscale.kernels.triton.decode")
    assert copy is not compiled
    assert sys.modules["blockscale.kernels.triton.decode"] is compiled
    assert isinstance(compiled.e2m1, triton.runtime.JITFunction)
    assert not isinstance(copy.e2m1, triton.runtime.JITFunction)
    assert isinstance(tl.sum, triton.runtime.JITFunction)


def test_bits_of_bf16() -> None:
    values = np.array([1.0, -2.0, 2.0**-133, np.inf], dtype=np.float32)
    assert fp32_to_bf16(values).tolist() == [0x3F80, 0xC000, 0x0001, 0x7F80]
    assert bf16_to_fp32(fp32_to_bf16(values)).tolist() == values.tolist()
