"""How near a result is to what it should be."""

from dataclasses import dataclass

import torch
from torch import Tensor

HALF_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}  # of a result's rounding
SUBNORMAL = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25, torch.float32: 2.0**-150}  # half the smallest step


class Mismatch(Exception):
    """A kernel's result is not what it should be. The message says where."""


@dataclass(frozen=True)
class Outcome:
    """`is_passed`, and in words what was seen."""

    is_passed: bool
    detail: str


def check_equal(what: str, found: Tensor, expected: Tensor) -> None:
    """The same bytes, -0 and NaN included."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise Mismatch(f"{what}: {found.dtype} {list(found.shape)}, not {expected.dtype} {list(expected.shape)}")
    a, b = (t.reshape(-1).view(torch.uint8) for t in (found, expected))
    differs = a != b
    if differs.any():
        count = int(differs.count_nonzero())
        raise Mismatch(f"{what}: {count} of {a.numel()} bytes differ, the first at {int(differs.int().argmax())}")


def check_near(what: str, found: Tensor, expected: Tensor, bound: Tensor) -> float:
    """|found - expected| <= bound everywhere (float64); the largest quotient of the two. NaN is near nothing."""
    if found.shape != expected.shape:
        raise Mismatch(f"{what}: {list(found.shape)}, not {list(expected.shape)}")
    quotient = (found.double() - expected).abs() / bound.clamp(min=1e-300)
    worst = quotient.nan_to_num(nan=torch.inf).amax() if quotient.numel() else torch.zeros(())
    if not bool(worst <= 1):
        place = torch.unravel_index(quotient.nan_to_num(nan=torch.inf).flatten().argmax(), quotient.shape)
        at = [int(i) for i in place]
        values = f"{found[tuple(at)].item():.6g}, not {expected[tuple(at)].item():.6g}"
        raise Mismatch(f"{what}: {values} at {at}, {float(worst):.3g} times what rounding explains")
    return float(worst)


def rounding(expected: Tensor, dtype: torch.dtype) -> Tensor:
    """What rounding a result to `dtype` may add."""
    return expected.abs() * HALF_UNIT[dtype] * (1 + 2.0**-7) + SUBNORMAL[dtype]
