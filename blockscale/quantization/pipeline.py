"""Quantize a model folder to a checkpoint folder: plan, calibrate where the recipe needs it, stream, check, publish.

    source tensors --unit by unit (a fused group, or one kept tensor)--> quantize --> dialect's tensors --> their places

A journal remembers the units that are done, so a killed run resumes with the same bytes.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.checkpoint.linear import KVScales, QuantizedLinear
from blockscale.checkpoint.output import Layout, OutputFolder
from blockscale.checkpoint.read_back import read_back_problem
from blockscale.checkpoint.reader import DIALECTS
from blockscale.checkpoint.record import activation_scale_entry
from blockscale.checkpoint.source import Source
from blockscale.checkpoint.structure import NOT_RUN, with_untied_head
from blockscale.checkpoint.units import run_units
from blockscale.errors import RecipeError
from blockscale.formats.tensor import empty_like_quantized
from blockscale.quantization.calibration_data import CalibrationData
from blockscale.quantization.layerwise.branches import empty_branches
from blockscale.quantization.layerwise.method import METHODS, Method
from blockscale.quantization.plan import Plan, PlannedLinear, kept_modules
from blockscale.quantization.recipe import Recipe
from blockscale.quantization.statistics import ActivationStatistics
from blockscale.quantization.summary import LayerRecord, Summary
from blockscale.quantization.units import kv_scales, make_units

Progress = Callable[[str, int, int], None]  # stage, done, total


def job_digest(source: Source, recipe: Recipe, calibration: str, device: str) -> str:
    """Identifies a job: same digest, same bytes. `calibration`: digest of the texts and windows, or ''."""
    files = sorted({info.path for t in source.tensors.values() for info in t.stored})
    stamps = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    versions = [version(name) for name in ("blockscale", "torch", "transformers")]
    facts = [versions, recipe.to_yaml(), calibration, device, dict(source.config), str(source.path.resolve()), stamps]
    what = json.dumps(facts, default=str)
    return hashlib.sha256(what.encode()).hexdigest()


def run(
    source: Source,
    plan: Plan,
    recipe: Recipe,
    output: OutputFolder,
    statistics: ActivationStatistics,
    *,
    calibration: CalibrationData | None = None,
    search: Mapping[str, object] | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Summary:
    """Streams every unit into `output` and publishes it. `calibration`: what `statistics` were found on; `search`: how
    the recipe was, for the checkpoint's record."""
    dialect = DIALECTS[recipe.dialect]
    units = make_units(plan, output, dialect, statistics, ActivationScale(recipe.activation_scale), device)
    total = sum(unit.num_bytes for unit in units)
    done = sum(unit.num_bytes for unit in units if unit.name in output.done)
    for unit, record in run_units([unit for unit in units if unit.name not in output.done]):
        output.mark_done(unit.name, record)
        done += unit.num_bytes
        if progress:
            progress("quantizing", done, total)
    for attention, kv in statistics.kv_amax.items():
        for name, tensor in dialect.kv_to_tensors(attention, kv_scales(kv)).items():
            output.write(name, tensor)

    layers = {m: LayerRecord(**record) for name in plan.groups for m, record in output.done[name].items()}
    schemes = {m: linear.scheme for m, linear in plan.linears.items()}
    files = dialect.config_files(
        with_untied_head(source.config, plan.linears),
        schemes,
        kept_modules(plan),
        recipe.kv_cache,
        low_rank=_low_rank(plan, recipe),
    )
    files["blockscale.json"] = _provenance(recipe, layers, calibration, statistics, search)
    output.finish(files, source.companions, check=lambda path: _check_result(path, plan))
    num_parameters = sum(math.prod(t.shape) for t in source.tensors.values())
    bits = 8 * output.tensor_bytes / num_parameters
    notices = plan.notices + (calibration.notices if calibration else ()) + statistics.notices
    return Summary(output.out, source.num_bytes, output.num_bytes, num_parameters, bits, layers, plan.kept, notices)


def output_layout(plan: Plan, recipe: Recipe, kv_modules: tuple[str, ...]) -> Layout:
    """Every tensor of the output in the source's order, from meta tensors that pass through the dialect.

    CheckpointError, before any work, for schemes that the dialect cannot hold.
    """
    dialect = DIALECTS[recipe.dialect]
    by_first: list[tuple[str, dict[str, Tensor]]] = []
    method = METHODS[recipe.method] if recipe.method else None
    for linear in plan.linears.values():
        by_first.append((linear.tensor.name, dialect.to_tensors(linear.module, _empty_linear(linear, method))))
    dialect.config_files({}, {m: linear.scheme for m, linear in plan.linears.items()}, [], recipe.kv_cache)
    by_first += [(t.name, {t.name: torch.empty(t.shape, dtype=t.dtype, device="meta")}) for t in plan.copied]
    position = {name: i for i, name in enumerate(_source_order(plan))}
    by_first.sort(key=lambda item: position[item[0]])
    layout = {n: (t.dtype, tuple(t.shape)) for _, tensors in by_first for n, t in tensors.items()}
    scalar = torch.empty(())
    for attention in kv_modules:
        if plan.kept.get(f"{attention}.k_proj") in NOT_RUN:  # no cache of these is calibrated
            continue
        for name, tensor in dialect.kv_to_tensors(attention, KVScales(scalar, scalar)).items():
            layout[name] = (tensor.dtype, tuple(tensor.shape))
    return layout


def _low_rank(plan: Plan, recipe: Recipe) -> set[str]:
    """Linears that have a low-rank branch."""
    method = METHODS[recipe.method] if recipe.method else None
    return {m for m, linear in plan.linears.items() if _empty_linear(linear, method).low_rank is not None}


def _empty_linear(linear: PlannedLinear, method: Method | None) -> QuantizedLinear:
    """On the meta device, with everything that will be stored of it."""
    weight = empty_like_quantized(linear.shape, linear.scheme.weight, linear.tensor.dtype)
    scale = torch.empty((), device="meta") if linear.scheme.needs_input_scale else None
    branches = empty_branches(linear, method) if method is not None else {}
    return QuantizedLinear(linear.scheme, weight, scale, **branches)


def _source_order(plan: Plan) -> list[str]:
    tensors = [linear.tensor for linear in plan.linears.values()] + list(plan.copied)
    return [t.name for t in sorted(tensors, key=lambda t: (str(t.stored[0].path), t.stored[0].offset))]


def _provenance(
    recipe: Recipe,
    layers: Mapping[str, LayerRecord],
    calibration: CalibrationData | None,
    statistics: ActivationStatistics,
    search: Mapping[str, object] | None,
) -> str:
    import transformers

    data = {
        "blockscale": version("blockscale"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "recipe": recipe.to_yaml(),
        **activation_scale_entry(ActivationScale(recipe.activation_scale)),
        "calibration_digest": calibration.digest if calibration else None,
        "num_calibration_tokens": statistics.num_tokens,
        "calibration": calibration.to_dict() if calibration else None,
        **({"search": search} if search else {}),
        "layers": {module: vars(record) for module, record in layers.items()},
    }
    return json.dumps(data, indent=1) + "\n"


def _check_result(path: Path, plan: Plan) -> None:
    """RecipeError unless the written folder reads back as exactly what was planned."""
    linears = {m: (linear.scheme, linear.shape) for m, linear in plan.linears.items()}
    problem = read_back_problem(path, linears, {t.name: (t.dtype, t.shape) for t in plan.copied})
    if problem:
        raise RecipeError(problem, hint="please report this")
