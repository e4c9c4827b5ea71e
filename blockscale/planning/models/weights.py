"""Bytes of weights by part: summed from a checkpoint's header, or from the formulas for a format."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from blockscale.errors import UsageError
from blockscale.planning.models.architecture import LINEAR_PARTS, Architecture, Matrix, Part

FORMATS = ("bf16", "fp8", "fp8-block128", "mxfp8", "nvfp4", "mxfp4", "int4")


@dataclass(frozen=True)
class PartWeights:
    """`activation`: what its inputs are rounded to, or None for 16 bits."""

    format: str
    activation: str | None
    num_bytes: int


@dataclass(frozen=True)
class Weights:
    """By part. `is_exact`: summed from files, not from formulas."""

    parts: Mapping[Part, PartWeights]
    is_exact: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts.values())

    def bytes_of(self, part: Part) -> int:
        return self.parts[part].num_bytes if part in self.parts else 0


def matrix_bytes(matrix: Matrix, fmt: str) -> int:
    """Codes, block scales and, for two-level formats, the global scale of each matrix."""
    n, k = matrix.n, matrix.k
    one = {
        "bf16": 2 * n * k,
        "fp8": n * k + 4,
        "fp8-block128": n * k + 4 * math.ceil(n / 128) * math.ceil(k / 128),
        "mxfp8": n * k + n * math.ceil(k / 32),
        "nvfp4": math.ceil(n * k / 2) + n * math.ceil(k / 16) + 4,
        "mxfp4": math.ceil(n * k / 2) + n * math.ceil(k / 32),
        "int4": math.ceil(n * k / 2) + n * math.ceil(k / 128) * 2 + math.ceil(n * math.ceil(k / 128) / 2),
    }[fmt]
    return one * matrix.count


_ACTIVATIONS = {"nvfp4": "nvfp4", "mxfp4": "mxfp4", "fp8": "fp8", "fp8-block128": "fp8", "mxfp8": "mxfp8"}


def weights_of(
    architecture: Architecture,
    fmt: str,
    overrides: Mapping[Part, str] | None = None,
    *,
    weight_only: bool = False,
) -> Weights:
    """Linears of every layer in `fmt`; embedding, head, norms and routers in bf16.

    overrides    other formats by part
    weight_only  activations stay in 16 bits
    """
    if fmt not in FORMATS:
        raise UsageError(f"unknown format '{fmt}'", hint="formats: " + ", ".join(FORMATS))
    formats: dict[Part, str] = dict.fromkeys(LINEAR_PARTS, fmt)
    formats.update(overrides or {})
    sizes: dict[Part, int] = {}
    for matrix in architecture.matrices():
        own = formats.get(matrix.part, "bf16")
        sizes[matrix.part] = sizes.get(matrix.part, 0) + matrix_bytes(matrix, own)
    return Weights(
        {
            part: PartWeights(
                formats.get(part, "bf16"), None if weight_only else _ACTIVATIONS.get(formats.get(part, "bf16")), size
            )
            for part, size in sizes.items()
        }
    )
