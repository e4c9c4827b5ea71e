"""The quotient of the quantizers, fma(x, r, x r') with r + r' = 1 / d, tried at every significand of a divisor.

E2M1 and E4M3 round at numbers t of at most five significant bits. What matters of a quotient is on which side of each
t it lies, or whether it is t: that must be as in the rounded division, for every x near t d. Further away both agree,
their difference being below an ulp. Powers of two change nothing. The arithmetic is that of
`blockscale.kernels.triton.nvfp4_blocks.reciprocal` and `quotient`, in C.
"""

import ctypes
from pathlib import Path

import pytest

from tests.kernels.compiled import make_host_library

SOURCE = r"""
#include <cmath>
#include <cstdint>
#include <cstring>

static float from_bits(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
static uint32_t to_bits(float f) { uint32_t bits; std::memcpy(&bits, &f, 4); return bits; }

// Divisors in [1, 2) where a quotient near `boundary` lies on another side of it than the rounded one.
extern "C" long count_wrong(float boundary, int has_rest) {
    long wrong = 0;
    for (uint32_t i = 0; i < (1u << 23); i++) {
        float d = from_bits(0x3F800000u + i);
        float r = 1.0f / d;
        float e = std::fmaf(-r, d, 1.0f);
        float p = e * r;
        float rest = has_rest ? std::fmaf(p, e, p) : 0.0f;
        uint32_t middle = to_bits(boundary * d);
        for (int step = -4; step <= 4; step++) {
            float x = from_bits(middle + step);
            float exact = x / d;
            float fast = std::fmaf(x, r, std::fmaf(x, rest, 0.0f));
            wrong += (exact > boundary) != (fast > boundary) || (exact >= boundary) != (fast >= boundary);
        }
    }
    return wrong;
}

// Divisors in [1, 2) and numbers of `bits` significant bits whose corrected quotient is not the rounded one.
extern "C" long count_not_rounded(int bits) {
    long wrong = 0;
    for (uint32_t i = 0; i < (1u << 23); i++) {
        float d = from_bits(0x3F800000u + i);
        float r = 1.0f / d;
        float e = std::fmaf(-r, d, 1.0f);
        float p = e * r;
        float rest = std::fmaf(p, e, p);
        for (uint32_t j = 0; j < (1u << (bits - 1)); j++) {
            float x = from_bits(0x3F800000u + (j << (24 - bits)));
            float q = std::fmaf(x, r, x * rest);
            wrong += std::fmaf(std::fmaf(-q, d, x), r, q) != x / d;
        }
    }
    return wrong;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("division")
    library = ctypes.CDLL(make_host_library(SOURCE, Path(folder), flags=("-O3", "-march=native", "-ffp-contract=off")))
    library.count_not_rounded.restype = ctypes.c_long
    library.count_wrong.argtypes, library.count_wrong.restype = [ctypes.c_float, ctypes.c_int], ctypes.c_long
    return library


@pytest.mark.parametrize("sixteenths", range(16, 32))
def test_quotients_lie_where_rounded_ones_do(library: ctypes.CDLL, sixteenths: int) -> None:
    assert library.count_wrong(sixteenths / 16, 1) == 0


def test_a_product_with_the_reciprocal_alone_would_not_do(library: ctypes.CDLL) -> None:
    assert library.count_wrong(1.25, 0) > 1000


def test_corrected_quotients_of_bf16_are_rounded_to_nearest(library: ctypes.CDLL) -> None:
    assert library.count_not_rounded(8) == 0
