"""MXFP4 to NVFP4: exact wherever the exponents allow it, and the least error elsewhere, against sums in float64."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from blockscale.conversion.mxfp4_cast import Cast, cast_group
from blockscale.formats.spec import MXFP4, NVFP4
from blockscale.formats.tensor import QuantizedTensor

from .stored import E2M1, values

VECTORS = Path(__file__).parents[1] / "golden" / "vectors" / "layouts.safetensors"
E4M3 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # every positive scale
ALL_CODES = torch.tensor([low | high << 4 for high in range(16) for low in range(16)], dtype=torch.uint8)


def mxfp4(packed: Tensor, exponents: Tensor) -> QuantizedTensor:
    """`packed` uint8 [N, K/2], `exponents` [N, K/32] from -127 to 127."""
    scale = (exponents + 127).to(torch.uint8)
    return QuantizedTensor(MXFP4, packed, scale, None, (packed.shape[0], packed.shape[1] * 2), torch.bfloat16)


def exact(q: QuantizedTensor) -> Tensor:
    """float64 [N, K]: what MXFP4 means."""
    codes = torch.stack((q.packed & 15, q.packed >> 4), dim=-1).flatten(-2)
    return E2M1[codes.long()] * 2.0 ** (q.block_scale.double() - 127).repeat_interleave(32, -1)


def decoded(cast: Cast) -> Tensor:
    """float64 [N, K]: what the NVFP4 means."""
    q = cast.weight
    assert q.format is NVFP4
    assert q.block_scale.dtype == torch.float8_e4m3fn
    assert q.block_scale.shape == (q.shape[0], q.shape[1] // 16)
    assert (q.global_scale.dtype, q.global_scale.shape) == (torch.float32, ())  # type: ignore[union-attr]
    return values(q.packed, q.block_scale) * q.global_scale.double()  # type: ignore[union-attr]


def shared_exponent(cast: Cast) -> int:
    mantissa, exponent = math.frexp(cast.weight.global_scale.item())  # type: ignore[union-attr]
    assert mantissa == 0.5
    return exponent - 1


# ---------------------------------------------------------------- within range


@pytest.mark.parametrize("exponent", range(-127, 128))
def test_every_code_at_every_exponent(exponent: int) -> None:
    q = mxfp4(ALL_CODES.view(2, -1), torch.full((2, 8), exponent))
    [cast] = cast_group([q])
    assert torch.equal(cast.weight.packed, q.packed)
    assert torch.equal(decoded(cast), exact(q))
    assert cast.error == 0
    assert torch.isfinite(cast.weight.global_scale.reciprocal())  # type: ignore[union-attr]


@given(st.integers(-110, 110), st.data())
def test_exponents_within_17_of_each_other(lowest: int, data: st.DataObject) -> None:
    """Codes are copied, both halves of a block have its power of two, and no value changes."""
    offsets = data.draw(st.lists(st.integers(0, 17), min_size=6, max_size=6))
    packed = torch.frombuffer(bytearray(data.draw(st.binary(min_size=96, max_size=96))), dtype=torch.uint8).view(2, -1)
    q = mxfp4(packed, torch.tensor(offsets).view(2, 3) + lowest)
    [cast] = cast_group([q])
    assert torch.equal(cast.weight.packed, packed)
    assert torch.equal(decoded(cast), exact(q))
    assert cast.error == 0


def test_all_eighteen_exponents_at_once() -> None:
    q = mxfp4(ALL_CODES[:16].repeat(18, 1), torch.arange(-12, 6).view(18, 1))
    [cast] = cast_group([q])
    assert shared_exponent(cast) == 5 - 8
    assert torch.equal(cast.weight.packed, q.packed)
    assert torch.equal(cast.weight.block_scale.double()[:, 0], 2.0 ** torch.arange(-9, 9).double())
    assert torch.equal(decoded(cast), exact(q))


@pytest.mark.parametrize("case", ["in_range", "out_of_range"])
def test_the_scales_of_model_optimizer(case: str) -> None:
    """Its own cast of these blocks, and of the ones that are out of range the same codes' largest magnitude."""
    vectors = {n.rpartition("/")[2]: t for n, t in load_file(VECTORS).items() if f"mxfp4_to_nvfp4/{case}/" in n}
    packed = vectors["blocks"].flatten(-2)
    q = QuantizedTensor(MXFP4, packed, vectors["scales"], None, (4, 192), torch.bfloat16)
    [cast] = cast_group([q])
    global_scale = vectors["global_amax"] / 2688
    assert torch.equal(cast.weight.global_scale, global_scale)  # type: ignore[arg-type]
    amax = vectors["per_block_amax"]
    theirs = torch.where(amax == 0, 1.0, amax / 6 / global_scale).clamp(2.0**-9, 448).to(torch.float8_e4m3fn)
    assert torch.equal(cast.weight.block_scale.view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(cast.weight.packed, packed) == (case == "in_range")
    assert (cast.error == 0) == (case == "in_range")


# ---------------------------------------------------------------- beyond it


def halves_of(q: QuantizedTensor) -> Tensor:
    return exact(q).view(-1, 16)


def is_exact_half(half: Tensor, shared: int) -> bool:
    """Whether any E4M3 scale at all holds these values."""
    units = half / 2.0**shared / E4M3.unsqueeze(-1)  # [scales, 16]
    return bool(torch.isin(units, E2M1).all(-1).any())


def lies_above(half: Tensor, shared: int) -> bool:
    """Whether a larger exponent would hold what this one does not: rounding so large a value costs most of all."""
    return not is_exact_half(half, shared) and any(is_exact_half(half, m) for m in range(shared + 1, 10))


spreads = st.lists(st.integers(-24, 6), min_size=6, max_size=6)


@settings(max_examples=60, deadline=None)
@given(spreads, st.data())
def test_the_best_shared_exponent(offsets: list[int], data: st.DataObject) -> None:
    """Of all exponents that are large enough for every half, none keeps more of them exact; those that can be are."""
    kinds = st.sampled_from(
        [ALL_CODES, torch.tensor([0x11, 0x19, 0x01], dtype=torch.uint8), torch.tensor([0x06, 0xE4])]
    )
    rows = []
    for _ in offsets:
        kind = data.draw(kinds)
        picks = data.draw(st.lists(st.integers(0, len(kind) - 1), min_size=16, max_size=16))
        rows.append(kind[torch.tensor(picks)].to(torch.uint8))
    q = mxfp4(torch.stack(rows), torch.tensor(offsets).view(6, 1))
    [cast] = cast_group([q])
    used = [half for half in halves_of(q) if half.any()]
    if not used:
        assert cast.error == 0
        return
    counts = {
        m: sum(is_exact_half(half, m) for half in used)
        for m in range(-40, 10)
        if not any(lies_above(half, m) for half in used)
    }
    assert counts[shared_exponent(cast)] == max(counts.values())
    after = decoded(cast).view(-1, 16)
    for before, half in zip(halves_of(q), after, strict=True):
        assert torch.equal(before, half) == is_exact_half(before, shared_exponent(cast)) or not before.any()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-60, 60), min_size=4, max_size=4), st.binary(min_size=64, max_size=64))
def test_what_is_rounded_has_the_least_error(offsets: list[int], codes: bytes) -> None:
    """Against every E4M3 scale with every value rounded to the nearest; and the error is what is reported."""
    q = mxfp4(torch.frombuffer(bytearray(codes), dtype=torch.uint8).view(4, 16), torch.tensor(offsets).view(4, 1))
    [cast] = cast_group([q])
    unit = 2.0 ** shared_exponent(cast)
    found = (decoded(cast) - exact(q)).view(-1, 16) / unit
    grid = E2M1.unique()
    for half, error in zip(halves_of(q) / unit, found, strict=True):
        levels = (grid * E4M3.unsqueeze(-1)).unsqueeze(1)  # [scales, 1, 15]
        nearest = (half.view(1, 16, 1) - levels).abs().amin(-1)  # [scales, 16]
        least = nearest.square().sum(-1).amin().item()
        assert error.square().sum().item() == pytest.approx(least, rel=1e-5, abs=1e-300)
    power = exact(q).square().sum()
    expected = math.sqrt(((decoded(cast) - exact(q)).square().sum() / power).item()) if power else 0.0
    assert cast.error == pytest.approx(expected, rel=1e-9)


def test_the_largest_values_are_never_cut() -> None:
    """One block lies 40 binades above thousands of others: it is the others that are rounded, to zero."""
    exponents = torch.full((64, 8), -20)
    exponents[5, 3] = 20
    q = mxfp4(ALL_CODES[1:129].repeat(64, 1), exponents)
    [cast] = cast_group([q])
    after, before = decoded(cast), exact(q)
    assert torch.equal(after[5, 96:128], before[5, 96:128])
    after[5, 96:128] = 0
    assert not after.any()
    assert 0 < cast.error < 2.0**-35


def test_a_group_shares_its_exponent() -> None:
    low, high = (mxfp4(ALL_CODES[:64].view(4, 16), torch.full((4, 1), exponent)) for exponent in (-3, 9))
    zeros = mxfp4(torch.full((4, 16), 0x80, dtype=torch.uint8), torch.full((4, 1), 100))
    casts = cast_group([low, zeros, high])
    assert [shared_exponent(cast) for cast in casts] == [1, 1, 1]
    for cast, q in zip(casts, (low, zeros, high), strict=True):
        assert torch.equal(decoded(cast), exact(q))
        assert torch.equal(cast.weight.packed, q.packed)
        assert cast.error == 0
    assert (casts[1].weight.block_scale.double() == 1).all()


def test_nothing_but_zeros() -> None:
    [cast] = cast_group([mxfp4(torch.tensor([[0x80] * 16, [0] * 16], dtype=torch.uint8), torch.tensor([[-127], [9]]))])
    assert not decoded(cast).any()
    assert cast.weight.global_scale.item() == 1  # type: ignore[union-attr]
    assert cast.error == 0


def test_a_stack_keeps_its_shape() -> None:
    packed = ALL_CODES.view(2, 4, 32)
    q = QuantizedTensor(MXFP4, packed, torch.full((2, 4, 2), 120, dtype=torch.uint8), None, (2, 4, 64), torch.bfloat16)
    [cast] = cast_group([q])
    assert torch.equal(cast.weight.packed, packed)
    assert (cast.weight.shape, cast.weight.block_scale.shape) == ((2, 4, 64), (2, 4, 4))
