"""What can be known about the kernel for many tokens without a GPU: its decoding, how work is dealt out, its plans."""

import ctypes

import numpy as np
import pytest
import torch

from blockscale.errors import FormatError
from blockscale.formats.spec import MXFP4, NVFP4, Format
from blockscale.formats.tensor import QuantizedTensor
from blockscale.kernels.cuda.linear_large import TILINGS, Tiling, linear, plan, program
from blockscale.kernels.device import Device
from blockscale.kernels.layouts import TILE_BYTES, to_fragments
from blockscale.kernels.nvrtc import SOURCES
from blockscale.kernels.prepare import row_major
from tests.kernels.compiled import make_host_library

H200 = Device("cuda", (9, 0), "H200", 132, 232448, 60 << 20)

_HOST = r"""
#include <cmath>
#include <cstring>
typedef unsigned int u32;
static float widen(u32 bits) { bits <<= 16; float f; memcpy(&f, &bits, 4); return f; }
static u32 exact(float f) { u32 b; memcpy(&b, &f, 4); return (b & 0xFFFF) ? 0xDEAD : b >> 16; }
static u32 multiply_bf16x2(u32 a, u32 b) {
  return exact(widen(a & 0xFFFF) * widen(b & 0xFFFF)) | exact(widen(a >> 16) * widen(b >> 16)) << 16;
}
static float widen_half(u32 h) {
  const float m = h & 0x3FF; const int e = h >> 10 & 31;
  const float v = e == 31 ? (m ? NAN : INFINITY) : e ? ldexpf(1024 + m, e - 25) : ldexpf(m, -24);
  return h & 0x8000 ? -v : v;
}
static u32 exact_half(float f) {
  const u32 sign = std::signbit(f) ? 0x8000 : 0; f = fabsf(f);
  if (f != f) return 0x7E00;
  if (f == 0) return sign;
  int e; frexpf(f, &e); e = e - 1 < -14 ? -14 : e - 1;
  const float m = ldexpf(f, 10 - e);
  if (m != floorf(m) || e > 15) return 0xDEAD;
  return sign | (m >= 1024 ? (u32)(e + 15) << 10 | ((u32)m - 1024) : (u32)m);
}
static u32 multiply_f16x2(u32 a, u32 b) {
  return exact_half(widen_half(a & 0xFFFF) * widen_half(b & 0xFFFF)) |
         exact_half(widen_half(a >> 16) * widen_half(b >> 16)) << 16;
}
#include "large_parts.cuh"
// As linear_large.cu's decode() does it: all 32 lanes, the four subtiles [kt][r] of a tile.
template <int TYPE, int FORMAT> static void tile(const unsigned char* t, u32* out) {
  for (int kt = 0; kt < 2; ++kt) for (int r = 0; r < 2; ++r) for (int lane = 0; lane < 32; ++lane) {
    u32 q[4]; memcpy(q, t + (kt * 2 + r) * 512 + lane * 16, 16);
    const unsigned char* scales = t + 2048 + r * 2 + lane / 4 * 32 + kt * 4;
    u32 bytes[4];
    const int own = lane & 3;
    for (int j = 0; j < 4; ++j) bytes[j] = scales[j * 8] | scales[j * 8 + 1] << 8;
    for (int half = 0; half < 2; ++half)
      fragments_of<TYPE, FORMAT>(q, bytes[own], bytes[own & 2], bytes[own | 1], half,
                                 out + ((kt * 2 + r) * 32 + lane) * 16 + 8 * half);
  }
}
extern "C" {
void tile_00(const unsigned char* t, u32* o) { tile<0, 0>(t, o); }
void tile_10(const unsigned char* t, u32* o) { tile<1, 0>(t, o); }
void tile_01(const unsigned char* t, u32* o) { tile<0, 1>(t, o); }
void tile_11(const unsigned char* t, u32* o) { tile<1, 1>(t, o); }
void part(const int* d, int worker, int i, int* out) {
  const Part p = part_of({d[0], d[1], d[2], d[3]}, worker, i); out[0] = p.tile; out[1] = p.begin; out[2] = p.end;
}
long long begin(const int* d, int place) { return dealt_begin({d[0], d[1], d[2], d[3]}, place); }
void place(int tile, int rows, int tokens, int band, int* out) {
  const Place p = place_of(tile, rows, tokens, band); out[0] = p.row; out[1] = p.token;
}
}
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = ctypes.CDLL(str(make_host_library(_HOST, tmp_path_factory.mktemp("host"))))
    library.begin.restype = ctypes.c_longlong
    return library


def weight(n: int, k: int, fmt: Format, scale: torch.Tensor) -> QuantizedTensor:
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(n + k))
    global_scale = torch.tensor(1.0) if fmt == NVFP4 else None
    return QuantizedTensor(fmt, packed, scale, global_scale, (n, k), torch.bfloat16)


def fragments(host: ctypes.CDLL, q: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight [n, k] as the kernel's registers hold it, put back by the operand map of mma.m16n8k16."""
    tiles = to_fragments(row_major(q)).packed.numpy()
    n, k = q.shape
    out = torch.zeros(tiles.shape[0] * 32, tiles.shape[1] * 128, dtype=dtype)
    decode = getattr(host, f"tile_{int(dtype == torch.float16)}{int(q.format == MXFP4)}")
    for i in range(tiles.shape[0]):
        for c in range(tiles.shape[1]):
            registers = np.zeros(2048, dtype=np.uint32)
            one = np.ascontiguousarray(tiles[i, c])
            assert one.size == TILE_BYTES
            decode(one.ctypes.data_as(ctypes.c_void_p), registers.ctypes.data_as(ctypes.c_void_p))
            values = torch.from_numpy(registers.view(np.int16).copy()).view(dtype)
            values = values.view(2, 2, 8, 4, 4, 2, 2, 2)  # kt r g t j columns+8 rows+8 element
            # columns: of 64, as [t 4][j 4, half 2][e 2], the transpose of what the instructions take
            values = values.permute(1, 6, 2, 0, 3, 4, 5, 7).reshape(32, 128)  # r h g | kt t j +8 e
            out[i * 32 : i * 32 + 32, c * 128 : c * 128 + 128] = values
    return out[:n, :k]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nvfp4_every_scale_is_decoded_exactly(host: ctypes.CDLL, dtype: torch.dtype) -> None:
    finite = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
    scale = finite.repeat(64 * 16 // len(finite) + 1)[: 64 * 16].view(64, 16).view(torch.float8_e4m3fn)
    q = weight(64, 256, NVFP4, scale)
    assert torch.equal(fragments(host, q, dtype).double() * 256, q.dequantize(torch.float32).double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nvfp4_nan_scale_stays_nan(host: ctypes.CDLL, dtype: torch.dtype) -> None:
    scale = torch.full((32, 8), 0x38, dtype=torch.uint8)
    scale[3, 5] = 0x7F
    q = weight(32, 128, NVFP4, scale.view(torch.float8_e4m3fn))
    found = fragments(host, q, dtype)
    assert found[3, 80:96].isnan().all()
    assert found.isnan().sum() == 16


def test_mxfp4_is_decoded_exactly(host: ctypes.CDLL) -> None:
    scale = torch.arange(0, 253, dtype=torch.uint8).repeat(3)[: 64 * 8].view(64, 8)
    q = weight(64, 256, MXFP4, scale)
    assert torch.equal(fragments(host, q, torch.bfloat16).double(), q.dequantize(torch.float32).double())


def test_mxfp4_as_float16_where_it_fits(host: ctypes.CDLL) -> None:
    scale = torch.arange(113, 140, dtype=torch.uint8).repeat(20)[: 64 * 8].view(64, 8)
    q = weight(64, 256, MXFP4, scale)
    assert torch.equal(fragments(host, q, torch.float16).double(), q.dequantize(torch.float32).double())


SHAPES = [(64, 8192, 8192), (128, 57344, 8192), (300, 4096, 4096), (1024, 8192, 8192), (5, 17, 16), (4096, 520, 272)]


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_step_of_every_tile_is_dealt_once(host: ctypes.CDLL, tiling: Tiling, shape: tuple[int, int, int]) -> None:
    p = plan(*shape, H200, tiling)
    tiles = p.row_tiles * p.token_tiles
    deal = (ctypes.c_int * 4)(tiles, p.steps, p.workers, p.waves)
    done = np.zeros((tiles, p.steps), dtype=np.int32)
    split = False
    for worker in range(p.workers):
        for i in range(10**6):
            part = (ctypes.c_int * 3)()
            host.part(deal, worker, i, part)
            tile, begin, end = part
            if begin == end:
                break
            done[tile, begin:end] += 1
            split |= end - begin < p.steps
            if begin > 0:  # somebody else finishes this tile: only the first of the parts dealt out by steps may be so
                assert i == p.waves
            if begin == 0 and end < p.steps:  # those whose sums are waited for: numbered lower, and begin after 0
                first_missing, place = (tile - p.waves * p.workers) * p.steps + end, p.workers - worker
                assert host.begin(deal, place) == first_missing
    assert (done == 1).all()
    assert split == p.is_split


@pytest.mark.parametrize(("rows", "tokens", "band"), [(7, 1, 4), (32, 5, 4), (3, 16, 4), (1, 9, 8)])
def test_places_are_a_permutation(host: ctypes.CDLL, rows: int, tokens: int, band: int) -> None:
    found = set()
    for tile in range(rows * tokens):
        place = (ctypes.c_int * 2)()
        host.place(tile, rows, tokens, band, place)
        found.add(tuple(place))
    assert found == {(r, t) for r in range(rows) for t in range(tokens)}


def test_plans_cover_the_product_and_fit_the_machine() -> None:
    for m, n, k in SHAPES:
        p = plan(m, n, k, H200)
        assert p.row_tiles * p.tiling.rows >= n
        assert p.token_tiles * p.tiling.tokens >= m
        assert p.steps * 128 >= k
        assert p.workers * p.tiling.cluster <= H200.num_sms
        assert p.tiling.shared_bytes <= H200.shared_memory_bytes


def test_wrong_operands_are_named() -> None:
    scale = torch.ones(32, 8).to(torch.float8_e4m3fn)
    plain = row_major(weight(32, 128, NVFP4, scale))
    tiles = to_fragments(plain)
    x = torch.zeros(4, 128, dtype=torch.bfloat16)
    with pytest.raises(FormatError, match="row_major"):
        linear(x, plain)
    with pytest.raises(FormatError, match="float32"):
        linear(x.float(), tiles)
    with pytest.raises(FormatError, match=r"\[4, 64\]"):
        linear(x[:, :64], tiles)
    with pytest.raises(FormatError, match="bias"):
        linear(x, tiles, torch.zeros(31, dtype=torch.bfloat16))
    with pytest.raises(FormatError, match=r"capability 9\.0"):
        linear(x, tiles)


def test_shared_memory_is_what_the_kernel_lays_out() -> None:
    source = (SOURCES / "linear_large.cu").read_text()
    assert "THREADS = COPIERS + MULTIPLIERS" in source
    for tiling in TILINGS:
        x, w = tiling.tokens * 128, 4 * tiling.blocks * TILE_BYTES
        barriers = tiling.x_stages * x + tiling.w_stages * w + 2 * 64 * 64 * 2
        assert tiling.shared_bytes == barriers + 2 * (tiling.x_stages + tiling.w_stages) * 8 + 1024
        assert f", {tiling.x_stages}, {tiling.w_stages}>" in program(tiling, torch.bfloat16, False).names[0]
