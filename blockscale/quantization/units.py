"""The pieces of work of a quantization: one per fused group of linears, one per tensor that is kept."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.checkpoint.linear import KVScales, QuantizedLinear
from blockscale.checkpoint.output import OutputFolder
from blockscale.checkpoint.units import Unit, copy_unit
from blockscale.errors import RecipeError
from blockscale.formats.spec import FP8, NVFP4, Format
from blockscale.formats.tensor import check_finite
from blockscale.quantization.plan import Plan, PlannedLinear
from blockscale.quantization.statistics import ActivationStatistics
from blockscale.quantization.weight import HEADROOM, MIN_SCALE, WeightError, quantize_weight, stored_global_scale

_KV_BOUND = 448.0  # of both FP8 and NVFP4 caches, as every loader expects


def make_units(
    plan: Plan,
    output: OutputFolder,
    dialect: Any,
    statistics: ActivationStatistics,
    activation_scale: ActivationScale,
    device: str,
) -> list[Unit]:
    """Every unit of a plan. `activation_scale`: how block scales of activations will be chosen."""
    units = []
    for name, members in plan.groups.items():
        num_bytes = sum(plan.linears[m].tensor.num_bytes for m in members)
        run = _group_unit(plan, members, output, dialect, statistics, activation_scale, device)
        units.append(Unit(name, num_bytes, num_bytes, run))
    return units + [copy_unit(tensor, output) for tensor in plan.copied]


def _group_unit(
    plan: Plan,
    members: tuple[str, ...],
    output: OutputFolder,
    dialect: Any,
    statistics: ActivationStatistics,
    activation_scale: ActivationScale,
    device: str,
) -> Callable[[], dict[str, dict[str, Any]]]:
    def run_unit() -> dict[str, dict[str, Any]]:
        linears = [plan.linears[m] for m in members]
        weights = [_read_weight(linear).to(device) for linear in linears]
        global_scale = _shared_global_scale(linears, weights)
        input_amax = max((statistics.input_amax[m] for m in members if m in statistics.input_amax), default=None)
        records = {}
        for i, linear in enumerate(linears):
            weight, error = quantize_weight(
                weights[i], linear.scheme.weight, linear.method, global_scale, linear.tensor.name
            )
            weights[i] = torch.empty(0)
            input_scale = _input_global_scale(linear, input_amax, activation_scale)
            quantized = QuantizedLinear(linear.scheme, weight, input_scale)
            for name, tensor in dialect.to_tensors(linear.module, quantized).items():
                output.write(name, tensor)
            records[linear.module] = _record(linear, error, input_amax if input_scale is not None else None)
        return records

    return run_unit


def _read_weight(linear: PlannedLinear) -> Tensor:
    weight = linear.tensor.read()
    return weight.transpose(-1, -2).contiguous() if linear.is_transposed else weight


def _shared_global_scale(linears: list[PlannedLinear], weights: list[Tensor]) -> Tensor | None:
    fmt = linears[0].scheme.weight
    if not fmt.has_global_scale:
        return None
    amaxes = [weight.abs().amax() for weight in weights]
    for linear, weight, amax in zip(linears, weights, amaxes, strict=True):
        check_finite(weight, amax, linear.tensor.name)
    return stored_global_scale(torch.stack(amaxes).amax(), linears[0].method, fmt)


def _input_global_scale(linear: PlannedLinear, amax: float | None, method: ActivationScale) -> Tensor | None:
    if not linear.scheme.needs_input_scale:
        return None
    if amax is None:
        raise RecipeError(f"{linear.module}: no activation statistics", hint="calibrate it, or keep it with --keep")
    assert linear.scheme.activation is not None
    return input_scale(amax, linear.scheme.activation, method)


def input_scale(amax: float, activation: Format, method: ActivationScale = ActivationScale.AMAX) -> Tensor:
    """fp32 0-d multiplier: amax / 2688 (NVFP4, with headroom where block scales are searched) or amax / 448 (FP8); 1
    where nothing but zeros was seen."""
    headroom = HEADROOM if activation is NVFP4 and method is not ActivationScale.AMAX else 1.0
    return _scale(amax * headroom / {NVFP4: 6.0 * 448.0, FP8: 448.0}[activation])


def kv_scales(amax: tuple[float, float]) -> KVScales:
    """Of keys and values; 1 where nothing but zeros was seen."""
    return KVScales(*(_scale(a / _KV_BOUND) for a in amax))


def _scale(value: float) -> Tensor:
    # a denormal scale has an infinite reciprocal, which is what engines use
    return torch.tensor(max(value, MIN_SCALE) if value > 0 else 1.0, dtype=torch.float32)


def _record(linear: PlannedLinear, error: WeightError, input_amax: float | None) -> dict[str, Any]:
    return {
        "format": linear.scheme.weight.name,
        "activation": linear.scheme.activation.name if linear.scheme.activation else None,
        "shape": list(linear.shape),
        "sqnr_db": round(error.sqnr_db, 3) if math.isfinite(error.sqnr_db) else None,
        "input_amax": input_amax,
    }
