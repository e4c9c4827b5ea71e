"""Which formats a GPU multiplies by itself, and what it does with the others, in plain words."""

from dataclasses import dataclass

from blockscale.planning.hardware.catalogue import Gpu
from blockscale.planning.models.architecture import LINEAR_PARTS
from blockscale.planning.models.weights import PartWeights
from blockscale.planning.speed.roofline import Deployment

BITS = {"bf16": 16.0, "fp8": 8.0, "fp8-block128": 8.0, "mxfp8": 8.25, "mxfp6": 6.25, "nvfp4": 4.5, "mxfp4": 4.25}
BITS["int4"] = 4.16  # in groups of 128, with their zeros


@dataclass(frozen=True)
class FormatUse:
    """How a GPU runs layers in a format: `operand` is what its tensor cores multiply."""

    parts: tuple[str, ...]
    format: str
    operand: str
    is_native: bool

    @property
    def bits(self) -> float:
        return BITS[self.format]


def format_uses(d: Deployment) -> tuple[FormatUse, ...]:
    """Of a deployment's layers, one for each pair of formats in them."""
    found: dict[PartWeights, list[str]] = {}
    for part in LINEAR_PARTS:
        if part in d.weights.parts:
            own = d.weights.parts[part]
            found.setdefault(PartWeights(own.format, own.activation, 0), []).append(part.value)
    return tuple(
        FormatUse(tuple(parts), own.format, *d.gpu.compute_format(own.format, own.activation))
        for own, parts in found.items()
    )


def is_native(gpu: Gpu, fmt: str) -> bool:
    """Whether the tensor cores multiply a format by themselves."""
    return fmt == "bf16" or fmt.removesuffix("-block128") in gpu.native
