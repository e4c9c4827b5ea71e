"""What a conversion did, for its caller."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blockscale.checkpoint.dialects import branches
from blockscale.checkpoint.dialects.stored import StoredModel


@dataclass(frozen=True)
class ConversionSummary:
    """`out` is a folder, or a .gguf file.

    num_linears   quantized linear layers of the source; a stack of experts is one
    exact         every value is known to be what it was, but for one unit in the last place of a global scale that is
                  stored as its reciprocal
    errors        module -> relative error (root of summed squares) of weights that were rounded
    """

    out: Path
    to: str
    source_bytes: int
    num_bytes: int
    num_linears: int
    exact: bool
    errors: Mapping[str, float]
    notices: tuple[str, ...]

    @property
    def worst_layers(self) -> list[tuple[str, float]]:
        """The three of largest error."""
        return sorted(self.errors.items(), key=lambda pair: -pair[1])[:3]

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**vars(self), "out": str(self.out)}


def residual_notices(model: StoredModel, why: str) -> tuple[str, ...]:
    """What is said where residual channels are left out, if there are any."""
    count = sum(branches.has_residual(linear.tensors) for linear in model.linears.values())
    return (f"the residual channels of {count} weights are left out: {why}",) if count else ()
