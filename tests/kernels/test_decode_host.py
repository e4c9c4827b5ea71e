"""cuda/decode.cuh as host C++: every code with every scale byte, against formats/. Needs g++."""

import ctypes
import shutil

import pytest
import torch

from blockscale.formats import mx, nvfp4
from blockscale.formats.packing import pack_nibbles
from blockscale.formats.spec import E2M1, MXFP4, NVFP4
from blockscale.kernels.layouts import CODE_BYTES, pack_tiles
from tests.kernels.compiled import make_host_library

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

# The multiplications of the GPU in software: products of two 8- or 11-bit significands are exact in a double, one
# rounding follows. Then the words of one 32 x 128 tile as the kernel's lanes read them, to 16-bit weights [32][128].
_SOURCE = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
static unsigned multiply_bf16x2(unsigned, unsigned);
static unsigned multiply_f16x2(unsigned, unsigned);
#include "decode.cuh"

static double value(u16 bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1, field = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits >> 15 ? -1 : 1;
  if (field == (1 << exponent_bits) - 1) return mantissa ? NAN : sign * INFINITY;
  const int exponent = (field ? field : 1) - bias - mantissa_bits;
  return sign * std::ldexp((double)(mantissa + (field ? 1 << mantissa_bits : 0)), exponent);
}
static u16 round_to(double v, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const u16 sign = std::signbit(v) ? 0x8000 : 0, infinity = ((1 << exponent_bits) - 1) << mantissa_bits;
  if (std::isnan(v)) return sign | infinity | 1;
  if (std::isinf(v)) return sign | infinity;
  if (v == 0) return sign;
  int exponent = std::ilogb(v);
  if (exponent < 1 - bias) exponent = 1 - bias;
  const long units = std::lrint(std::ldexp(std::fabs(v), mantissa_bits - exponent));
  const long bits = units + ((long)(exponent + bias - 1) << mantissa_bits);
  return sign | (bits >= infinity ? infinity : (u16)bits);
}
static unsigned multiply(unsigned a, unsigned b, int e, int m) {
  const unsigned low = round_to(value((u16)a, e, m) * value((u16)b, e, m), e, m);
  return low | (unsigned)round_to(value(a >> 16, e, m) * value(b >> 16, e, m), e, m) << 16;
}
static unsigned multiply_bf16x2(unsigned a, unsigned b) { return multiply(a, b, 8, 7); }
static unsigned multiply_f16x2(unsigned a, unsigned b) { return multiply(a, b, 5, 10); }

template <int TYPE, int FORMAT>
static void decode_tile(const u8* tile, u16* out) {
  for (int kt = 0; kt < 2; kt++)
    for (int r = 0; r < 2; r++)
      for (int lane = 0; lane < 32; lane++) {
        const int g = lane >> 2, t = lane & 3;
        u32 codes[4], scales[2], factor[2], other[2] = {0, 0};
        std::memcpy(codes, tile + (kt * 2 + r) * 512 + lane * 16, 16);
        std::memcpy(&scales[0], tile + 2048 + (FORMAT == NVFP4 ? lane : lane & ~1) * 8 + kt * 4, 4);
        std::memcpy(&scales[1], tile + 2048 + (lane | 1) * 8 + kt * 4, 4);
        for (int h = 0; h < 2; h++) {
          if (FORMAT == NVFP4) factor[h] = nvfp4_scale_pair<TYPE>(scales[0], r * 2 + h);
          else mxfp4_factor_pairs<TYPE>(scales[0], scales[1], r * 2 + h, factor[h], other[h]);
          for (int w = 0; w < 2; w++) {
            u32 pairs[4];
            decode_word<TYPE, FORMAT>(codes[h * 2 + w], factor[h], other[h], pairs);
            std::memcpy(out + (16 * r + 8 * h + g) * 128 + 64 * kt + 16 * t + 8 * w, pairs, 16);
          }
        }
      }
}
extern "C" void decode(const u8* tile, int type, int format, long count, u16* out) {
  for (long i = 0; i < count; i++, tile += 2304, out += 32 * 128) {
    if (type == BF16 && format == NVFP4) decode_tile<BF16, NVFP4>(tile, out);
    if (type == BF16 && format == MXFP4) decode_tile<BF16, MXFP4>(tile, out);
    if (type == FP16 && format == NVFP4) decode_tile<FP16, NVFP4>(tile, out);
    if (type == FP16 && format == MXFP4) decode_tile<FP16, MXFP4>(tile, out);
  }
}
extern "C" float factor(int format) { return format == NVFP4 ? weight_factor<NVFP4>() : weight_factor<MXFP4>(); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    built = ctypes.CDLL(str(make_host_library(_SOURCE, tmp_path_factory.mktemp("decode"))))
    built.factor.restype = ctypes.c_float
    return built


def _every_code_and_scale(num_scales: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """packed [num_scales, block/2 * 8] and scale bytes [num_scales, 8]: row s has all 16 codes in each block."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(num_scales, block // 16 * 8)
    codes = torch.stack([row.roll(i) for i, row in enumerate(codes)])
    scales = torch.arange(num_scales, dtype=torch.int32)[:, None] + torch.arange(8)
    return pack_nibbles(codes), (scales % num_scales).to(torch.uint8)


def _decode(library, packed, block_scale, fmt, dtype) -> torch.Tensor:
    """16-bit weights [N, K], as the kernel gives them to the tensor cores, times their factor: float64."""
    tiles = pack_tiles(packed, block_scale, fmt)
    rows, columns = tiles.shape[0] * 32, tiles.shape[1] * 128
    out = torch.empty(tiles.shape[0] * tiles.shape[1], 32, 128, dtype=dtype)
    is_mxfp4 = int(fmt is MXFP4)
    count = ctypes.c_long(out.shape[0])
    library.decode(
        ctypes.c_void_p(tiles.data_ptr()), int(dtype == torch.float16), is_mxfp4, count, ctypes.c_void_p(out.data_ptr())
    )
    values = out.view(*tiles.shape[:2], 32, 128).transpose(1, 2).reshape(rows, columns)
    return values[: packed.shape[0], : packed.shape[1] * 2].double() * library.factor(is_mxfp4)


def _assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(
        found.nan_to_num(nan=0.0, posinf=1e300, neginf=-1e300),
        expected.nan_to_num(nan=0.0, posinf=1e300, neginf=-1e300),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_nvfp4_weights_are_exact_for_every_code_and_scale(library, dtype):
    packed, block_scale = _every_code_and_scale(256, 16)  # signed scales and both NaN included
    expected = nvfp4.decode_unscaled(packed, block_scale.view(torch.float8_e4m3fn)).double()
    _assert_same(_decode(library, packed, block_scale, NVFP4, dtype), expected)


def test_mxfp4_weights_are_exact_in_bfloat16_for_every_code_and_scale(library):
    packed, block_scale = _every_code_and_scale(256, 32)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    expected = mx.decode_codes(codes, block_scale, E2M1).double()  # overflows where bfloat16 does
    _assert_same(_decode(library, packed, block_scale, MXFP4, torch.bfloat16), expected)


def test_mxfp4_weights_in_float16_are_what_float16_holds_of_them(library):
    packed, block_scale = _every_code_and_scale(256, 32)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    expected = mx.decode_codes(codes, block_scale, E2M1).half().double()
    _assert_same(_decode(library, packed, block_scale, MXFP4, torch.float16), expected)


def test_layout_of_random_weights_decodes_to_them(library):
    g = torch.Generator().manual_seed(3)
    packed = torch.randint(0, 256, (77, 200), dtype=torch.uint8, generator=g)
    block_scale = torch.randint(0, 127, (77, 25), dtype=torch.uint8, generator=g)
    expected = nvfp4.decode_unscaled(packed, block_scale.view(torch.float8_e4m3fn)).double()
    assert CODE_BYTES == 2048
    assert torch.equal(_decode(library, packed, block_scale, NVFP4, torch.bfloat16), expected)
