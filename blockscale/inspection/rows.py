"""An inspection as rows to show: repeated layers as one, figures as text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from blockscale.inspection.census import Census
from blockscale.inspection.collapse import Row, collapse
from blockscale.inspection.engines import Verdict
from blockscale.inspection.inventory import (
    Inspection,
    Kept,
    Layer,
    Linear,
    Range,
    bits_per_parameter,
    global_range,
    input_range,
    joined_census,
)
from blockscale.pages import DASH


@dataclass(frozen=True)
class LayerRow:
    """Layers of one format and shape. `shape`: `64+32+32 x 64` of three that are fused. Scales: over all of them."""

    name: str
    num_layers: int
    format: str
    activation: str
    shape: str
    num_parameters: int
    num_bytes: int
    global_scale: str
    input_scale: str
    block_scales: Census | None

    @property
    def bits_per_parameter(self) -> float | None:
        return bits_per_parameter(self.num_bytes, self.num_parameters)


@dataclass(frozen=True)
class KeptRow:
    """Kept tensors of one format, shape and reason."""

    name: str
    num_tensors: int
    format: str
    shape: str
    num_bytes: int
    reason: str


def layer_rows(inspection: Inspection, *, every: bool = False) -> list[LayerRow]:
    """`every`: one row a layer; otherwise repeated ones are one."""
    if every:
        return [_layer_row(Row(layer.name, (layer,))) for layer in inspection.layers]
    rows = collapse(inspection.layers, lambda layer: layer.name, _alike)
    return [_layer_row(row) for row in rows]


def _alike(layer: Layer) -> tuple[object, ...]:
    return layer.format, layer.activation, layer.shapes, layer.rank, layer.num_residual_channels


def _layer_row(row: Row[Layer]) -> LayerRow:
    first = row.items[0]
    members: list[Linear] = [member for layer in row.items for member in layer.members]
    return LayerRow(
        row.name,
        len(row.items),
        format_text(first),
        first.activation or "16-bit",
        shape_text(first.shapes),
        sum(m.num_parameters for m in members),
        sum(m.num_bytes for m in members),
        range_text(global_range(members)),
        range_text(input_range(members)),
        joined_census(members),
    )


def format_text(layer: Layer) -> str:
    """`nvfp4 + rank 32 + 64 residual channels`: the format, and what lies beside the codes."""
    rank, channels = layer.rank, layer.num_residual_channels
    parts = [layer.format]
    parts += [f"rank {rank}"] if rank else []
    parts += [f"{channels} residual channels"] if channels else []
    return " + ".join(parts)


def kept_rows(inspection: Inspection, *, every: bool = False) -> list[KeptRow]:
    """`every`: one row a tensor; otherwise repeated ones are one."""
    kept = inspection.kept
    rows = (
        [Row(tensor.name, (tensor,)) for tensor in kept]
        if every
        else collapse(kept, lambda tensor: tensor.name, lambda tensor: (tensor.format, tensor.shape, tensor.reason))
    )
    return [_kept_row(row) for row in rows]


def _kept_row(row: Row[Kept]) -> KeptRow:
    first = row.items[0]
    num_bytes = sum(tensor.num_bytes for tensor in row.items)
    return KeptRow(row.name, len(row.items), first.format, shape_text((first.shape,)), num_bytes, first.reason)


def shape_text(shapes: Sequence[tuple[int, ...]]) -> str:
    """`64 x 32`; `64+32 x 32` of two that share their K; a dash for a scalar."""
    first = shapes[0]
    if len(shapes) > 1 and len({shape[-1:] for shape in shapes}) == 1 and all(len(shape) == 2 for shape in shapes):
        return f"{'+'.join(str(shape[0]) for shape in shapes)} x {first[1]}"
    texts = dict.fromkeys(" x ".join(map(str, shape)) or DASH for shape in shapes)
    return ", ".join(texts)


def range_text(found: Range | None) -> str:
    """`1.2e-05 to 3.4e-04`, or one figure where both are the same."""
    if found is None:
        return DASH
    if math.isnan(found.low):
        return "NaN"
    low, high = f"{found.low:.3g}", f"{found.high:.3g}"
    return low if low == high else f"{low} to {high}"


def census_text(census: Census | None) -> str:
    """Magnitudes, and what should not be there."""
    if census is None:
        return DASH
    odd = ((census.num_zero, "zero"), (census.num_negative, "negative"), (census.num_nan, "NaN"))
    notes = [f"{count:,} {what}" for count, what in odd if count]
    if census.subnormal_share > 0:
        notes.append(f"{100 * census.subnormal_share:.2g} % subnormal")
    low, high = census.minimum, census.maximum
    magnitudes = [] if low is None or high is None else [range_text(Range(low, high))]
    return ", ".join([*magnitudes, *notes]) or DASH


def verdict_text(verdict: Verdict) -> str:
    if verdict.loads is None:
        return "not known"
    if not verdict.loads:
        return "refuses"
    return "loads after conversion" if verdict.after else "loads"


def reason_text(verdict: Verdict) -> str:
    return "; ".join(part for part in (verdict.after and f"`{verdict.after}`", verdict.reason) if part)


def origin_text(inspection: Inspection) -> str:
    """`LlamaForCausalLM, modelopt, written by modelopt 0.47.0, recipe nvfp4`."""
    parts = [inspection.architecture, inspection.dialect or "not quantized"]
    if inspection.producer:
        parts.append(f"written by {inspection.producer}")
    names = [line.removeprefix("name: ") for line in inspection.recipe.splitlines() if line.startswith("name: ")]
    parts += [f"recipe {name}" for name in names[:1]]
    return ", ".join(part for part in parts if part)


def cache_text(inspection: Inspection) -> str:
    """One sentence on the KV cache."""
    cache = inspection.kv_cache
    if cache is None:
        return "16 bits"
    if not cache.num_layers:
        return f"{cache.format}, without scales"
    scales = f"keys {range_text(cache.key_scale)}, values {range_text(cache.value_scale)}"
    return f"{cache.format or 'not in the config'}, scales of {cache.num_layers} layers: {scales}"


def fault_text(inspection: Inspection) -> str:
    """What to do about faults; empty without any."""
    num = len(inspection.faults)
    return (
        f"{num:,} fault{'s' if num > 1 else ''} found: `blockscale lint` explains them and looks closer" if num else ""
    )
