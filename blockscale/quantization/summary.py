"""What a quantization did, for its caller and for the checkpoint's own record."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median


@dataclass(frozen=True)
class LayerRecord:
    """What became of one linear, as kept in blockscale.json.

    chosen     the candidate that won for its fused group, where there were several ways
    gain       share of round to nearest's output error that it removed, on held-back tokens
    smoothing  what its input's scales were made from
    """

    format: str
    activation: str | None
    shape: tuple[int, ...]
    sqnr_db: float | None
    input_amax: float | None
    chosen: str | None = None
    gain: float | None = None
    smoothing: str | None = None

    @property
    def scheme(self) -> str:
        return f"{self.format} (activations {self.activation or '16-bit'})"


@dataclass(frozen=True)
class Learning:
    """What learning over the whole model changed, as kept in blockscale.json. KL(16 bits || quantized) in nats a token,
    on windows that nothing was learned from.

    best_step  how many steps had been taken when the model stood as it was written; 0: nothing was better than the
               start
    """

    steps: int
    seed: int
    best_step: int
    kl_before: float
    kl_after: float
    num_codes: int
    num_codes_changed: int
    num_block_scales_changed: int
    num_gains_changed: int


@dataclass(frozen=True)
class Summary:
    """What `quantize` did. `layers` by module; `kept` module -> why; `learning`: None without any."""

    out: Path
    source_bytes: int
    num_bytes: int
    num_parameters: int
    bits_per_parameter: float
    layers: Mapping[str, LayerRecord]
    kept: Mapping[str, str]
    notices: tuple[str, ...]
    learning: Learning | None = None

    @property
    def formats(self) -> list[str]:
        """What the linears are stored as, each once."""
        return list(dict.fromkeys(layer.scheme for layer in self.layers.values()))

    @property
    def worst_layers(self) -> list[tuple[str, float]]:
        """The three linears with the least SQNR, in dB."""
        known = [(name, layer.sqnr_db) for name, layer in self.layers.items() if layer.sqnr_db is not None]
        return sorted(known, key=lambda pair: pair[1])[:3]

    @property
    def choices(self) -> dict[str, int]:
        """How many linears each candidate of a method won, most first."""
        found = Counter(layer.chosen for layer in self.layers.values() if layer.chosen)
        return dict(found.most_common())

    @property
    def median_gain(self) -> float | None:
        """Share of round to nearest's output error removed, on held-back tokens; half of the linears gain more."""
        gains = [layer.gain for layer in self.layers.values() if layer.gain is not None]
        return median(gains) if gains else None

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        layers = {name: vars(layer) for name, layer in self.layers.items()}
        learning = asdict(self.learning) if self.learning is not None else None
        return {**vars(self), "out": str(self.out), "layers": layers, "learning": learning}
