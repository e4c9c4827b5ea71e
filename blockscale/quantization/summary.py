"""What a quantization did, for its caller and for the checkpoint's own record."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LayerRecord:
    """What became of one linear, as kept in blockscale.json."""

    format: str
    activation: str | None
    shape: tuple[int, ...]
    sqnr_db: float | None
    input_amax: float | None

    @property
    def scheme(self) -> str:
        return f"{self.format} (activations {self.activation or '16-bit'})"


@dataclass(frozen=True)
class Summary:
    """What `quantize` did. `layers` by module; `kept` module -> why."""

    out: Path
    source_bytes: int
    num_bytes: int
    num_parameters: int
    bits_per_parameter: float
    layers: Mapping[str, LayerRecord]
    kept: Mapping[str, str]
    notices: tuple[str, ...]

    @property
    def formats(self) -> list[str]:
        """What the linears are stored as, each once."""
        return list(dict.fromkeys(layer.scheme for layer in self.layers.values()))

    @property
    def worst_layers(self) -> list[tuple[str, float]]:
        """The three linears with the least SQNR, in dB."""
        known = [(name, layer.sqnr_db) for name, layer in self.layers.items() if layer.sqnr_db is not None]
        return sorted(known, key=lambda pair: pair[1])[:3]

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        layers = {name: vars(layer) for name, layer in self.layers.items()}
        return {**vars(self), "out": str(self.out), "layers": layers}
