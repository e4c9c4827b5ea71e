"""What `inspect` knows of a checkpoint, as data: layers, kept tensors, scales, totals, and who can load it."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from blockscale.checkpoint.faults import Fault
from blockscale.inspection.census import Census, joined
from blockscale.inspection.engines import Verdict
from blockscale.inspection.weights import Weight


@dataclass(frozen=True, slots=True)
class Range:
    """Smallest and largest; NaN for both where one is."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear weight with its scales as multipliers, whatever the dialect's direction."""

    weight: Weight
    global_scale: float | None = None
    input_scale: float | None = None
    block_scales: Census | None = None

    @property
    def num_parameters(self) -> int:
        return math.prod(self.weight.shape)

    @property
    def num_bytes(self) -> int:
        """Of codes, every scale, and what lies beside them."""
        return sum(info.num_bytes for info in self.weight.tensors)


@dataclass(frozen=True)
class Layer:
    """A linear, or those that engines fuse into one. `name`: `a.q+k+v_proj`."""

    name: str
    members: tuple[Linear, ...]

    @property
    def format(self) -> str:
        return _joined_names(m.weight.format for m in self.members) or ""

    @property
    def activation(self) -> str | None:
        """What the input is rounded to; None: it stays in 16 bits."""
        return _joined_names(m.weight.activation for m in self.members)

    @property
    def rank(self) -> int:
        """The largest of its low-rank branches; 0 without any."""
        return max(m.weight.rank for m in self.members)

    @property
    def num_residual_channels(self) -> int:
        """The most that a member has."""
        return max(m.weight.num_residual_channels for m in self.members)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """[N, K] or [E, N, K], by member."""
        return tuple(m.weight.shape for m in self.members)

    @property
    def num_parameters(self) -> int:
        return sum(m.num_parameters for m in self.members)

    @property
    def num_bytes(self) -> int:
        return sum(m.num_bytes for m in self.members)

    @property
    def bits_per_parameter(self) -> float | None:
        return bits_per_parameter(self.num_bytes, self.num_parameters)

    def to_dict(self) -> dict[str, object]:
        """For JSON. `shape`: of what the members make together, where their K is the same."""
        shapes = self.shapes
        *lead, _, k = shapes[0] if len(shapes[0]) > 1 else (0, *shapes[0])
        is_one = all(len(shape) == len(shapes[0]) and shape[-1] == k for shape in shapes)
        census = joined_census(self.members)
        return {
            "name": self.name,
            "members": [m.weight.name for m in self.members],
            "format": self.format,
            "activation": self.activation,
            "rank": self.rank,
            "num_residual_channels": self.num_residual_channels,
            "shape": [*lead, sum(shape[-2] for shape in shapes), k] if is_one and len(shapes[0]) > 1 else None,
            "shapes": [list(shape) for shape in shapes],
            "num_parameters": self.num_parameters,
            "bytes": self.num_bytes,
            "bits_per_parameter": self.bits_per_parameter,
            "scales": {
                "global": _pair(global_range(self.members)),
                "input": _pair(input_range(self.members)),
                "block": None if census is None else census_figures(census),
            },
        }


def global_range(members: Iterable[Linear]) -> Range | None:
    return range_of(m.global_scale for m in members)


def input_range(members: Iterable[Linear]) -> Range | None:
    return range_of(m.input_scale for m in members)


def joined_census(members: Iterable[Linear]) -> Census | None:
    """None without block scales, or with block scales of two kinds."""
    found = [m.block_scales for m in members if m.block_scales is not None]
    return joined(found) if len({census.scale for census in found}) == 1 else None


def census_figures(census: Census) -> dict[str, object]:
    """Magnitudes are without zeros and NaN."""
    return {
        "num": census.total,
        "min": census.minimum,
        "max": census.maximum,
        "num_zero": census.num_zero,
        "num_negative": census.num_negative,
        "num_nan": census.num_nan,
        "subnormal_share": census.subnormal_share,
    }


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that belongs to no quantized linear."""

    name: str
    format: str
    shape: tuple[int, ...]
    num_bytes: int
    reason: str


@dataclass(frozen=True)
class KVCache:
    """`format`: what the config announces, None where it says nothing. Scales are multipliers, one a layer."""

    format: str | None
    num_layers: int
    key_scale: Range | None
    value_scale: Range | None


@dataclass(frozen=True)
class FormatTotal:
    """Everything stored in one format."""

    format: str
    num_tensors: int
    num_parameters: int
    num_bytes: int


@dataclass(frozen=True)
class Inspection:
    """dialect   "modelopt", "compressed-tensors", another quant_method, or None: nothing is quantized
    producer  who wrote it, as far as the configs say
    recipe    the recipe that blockscale stored with it (YAML); empty where another tool wrote it
    faults    what files, configs and scales contradict each other in, as far as was looked: `lint` looks closer
    """

    path: Path
    dialect: str | None
    architecture: str
    producer: str
    recipe: str
    layers: tuple[Layer, ...]
    kept: tuple[Kept, ...]
    kv_cache: KVCache | None
    num_bytes: int
    faults: tuple[Fault, ...]
    engines: tuple[Verdict, ...]
    notices: tuple[str, ...] = ()

    @property
    def linears(self) -> Iterator[Linear]:
        return (member for layer in self.layers for member in layer.members)

    @cached_property
    def num_parameters(self) -> int:
        return sum(t.num_parameters for t in self.by_format)

    @property
    def bits_per_parameter(self) -> float | None:
        """Every stored bit, over the parameters that they stand for: scales count as bits, not as parameters."""
        return bits_per_parameter(self.num_bytes, self.num_parameters)

    @property
    def quantized_bits_per_parameter(self) -> float | None:
        """Of the quantized linears alone; None without any."""
        layers = self.layers if self.dialect is not None else ()
        return bits_per_parameter(sum(x.num_bytes for x in layers), sum(x.num_parameters for x in layers))

    @cached_property
    def by_format(self) -> tuple[FormatTotal, ...]:
        """Largest first. Scales of the KV cache are in none."""
        totals: dict[str, list[int]] = {}
        parts = [(m.weight.format, m.num_parameters, m.num_bytes) for m in self.linears]
        parts += [(k.format, math.prod(k.shape), k.num_bytes) for k in self.kept]
        for name, num_parameters, num_bytes in parts:
            total = totals.setdefault(name, [0, 0, 0])
            total[0] += 1
            total[1] += num_parameters
            total[2] += num_bytes
        return tuple(sorted((FormatTotal(n, *t) for n, t in totals.items()), key=lambda t: -t.num_bytes))

    def to_dict(self) -> dict[str, object]:
        """For JSON; ranges are [low, high]."""
        cache = self.kv_cache
        return {
            "path": str(self.path),
            "architecture": self.architecture,
            "dialect": self.dialect,
            "producer": self.producer,
            "recipe": self.recipe,
            "num_parameters": self.num_parameters,
            "bytes": self.num_bytes,
            "bits_per_parameter": self.bits_per_parameter,
            "quantized_bits_per_parameter": self.quantized_bits_per_parameter,
            "formats": [
                {
                    "format": total.format,
                    "num_tensors": total.num_tensors,
                    "num_parameters": total.num_parameters,
                    "bytes": total.num_bytes,
                    "bits_per_parameter": bits_per_parameter(total.num_bytes, total.num_parameters),
                }
                for total in self.by_format
            ],
            "engines": {
                v.engine: {"loads": v.loads, "reason": v.reason, "after": v.after, "checked": v.checked}
                for v in self.engines
            },
            "kv_cache": cache
            and {
                "format": cache.format,
                "num_layers": cache.num_layers,
                "key_scale": _pair(cache.key_scale),
                "value_scale": _pair(cache.value_scale),
            },
            "num_faults": len(self.faults),
            "faults": [{"rule": f.rule, "layer": f.where, "message": f.message} for f in self.faults],
            "notices": list(self.notices),
            "layers": [layer.to_dict() for layer in self.layers],
            "kept": [
                {"name": k.name, "format": k.format, "shape": list(k.shape), "bytes": k.num_bytes, "reason": k.reason}
                for k in self.kept
            ],
        }


def _pair(found: Range | None) -> list[float] | None:
    return None if found is None else [found.low, found.high]


def bits_per_parameter(num_bytes: int, num_parameters: int) -> float | None:
    return 8 * num_bytes / num_parameters if num_parameters else None


def range_of(values: Iterable[float | None]) -> Range | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if any(math.isnan(value) for value in known):
        return Range(math.nan, math.nan)
    return Range(min(known), max(known))


def _joined_names(names: Iterable[str | None]) -> str | None:
    found = [name for name in dict.fromkeys(names) if name is not None]
    return " + ".join(found) if found else None
