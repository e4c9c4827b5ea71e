"""Vectors that the peers' own code made; see tests/golden/vectors/README.md."""

from functools import cache
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "golden" / "vectors"


@cache
def load(name: str) -> dict[str, Tensor]:
    """All tensors of one file, by key. Shared between tests: do not write to them."""
    return load_file(FOLDER / f"{name}.safetensors")


def cases(name: str) -> list[str]:
    """The finite cases of one file."""
    return sorted({key.split("/")[0] for key in load(name)} - {"special_nan_fp32", "special_inf_fp32"})


def source(case: str) -> Tensor:
    """The input of a case."""
    return load("inputs")[case]
