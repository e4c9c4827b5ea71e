"""Quantize a model folder to a checkpoint folder: plan, calibrate where the recipe needs it, stream, check, publish.

    source tensors --unit by unit (a fused group, or one kept tensor)--> quantize --> dialect's tensors --> their places

A unit holds its own tensors in memory and nothing else. Units are independent and finish in any order; a journal
remembers them, so a killed run resumes with the same bytes.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockscale.checkpoint.linear import KVScales, QuantizedLinear
from blockscale.checkpoint.output import Layout, OutputFolder
from blockscale.checkpoint.reader import DIALECTS, open_checkpoint
from blockscale.checkpoint.source import Source, SourceTensor
from blockscale.errors import CheckpointError, RecipeError
from blockscale.formats.spec import FP8, NVFP4, Format
from blockscale.formats.tensor import check_finite, empty_like_quantized
from blockscale.quantization.plan import NOT_RUN, Plan, PlannedLinear, kept_modules
from blockscale.quantization.recipe import Recipe
from blockscale.quantization.statistics import ActivationStatistics
from blockscale.quantization.weight import WeightError, global_scale_from_amax, quantize_weight

Progress = Callable[[str, int, int], None]  # stage, done, total
_MAX_WORKERS = 4
_MIN_SCALE = 2.0**-126  # fp32's smallest normal number
_KV_BOUND = 448.0  # of both FP8 and NVFP4 caches, as every loader expects


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


def job_digest(source: Source, recipe: Recipe, calibration: str) -> str:
    """Identifies a job: same digest, same bytes. `calibration`: digest of the texts and windows, or ''."""
    files = sorted({info.path for t in source.tensors.values() for info in t.stored})
    stamps = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    what = json.dumps([version("blockscale"), recipe.to_yaml(), calibration, dict(source.config), stamps], default=str)
    return hashlib.sha256(what.encode()).hexdigest()


def run(
    source: Source,
    plan: Plan,
    recipe: Recipe,
    output: OutputFolder,
    statistics: ActivationStatistics,
    *,
    calibration: str = "",
    device: str = "cpu",
    progress: Progress | None = None,
) -> Summary:
    """Streams every unit into `output` and publishes it."""
    dialect = DIALECTS[recipe.dialect]
    units: dict[str, Callable[[], Any]] = {
        name: _group_unit(plan, members, output, dialect, statistics, device) for name, members in plan.groups.items()
    }
    units |= {tensor.name: _copy_unit(tensor, output) for tensor in plan.copied}
    order = [name for name in units if name not in output.done]
    sizes = _unit_bytes(plan)
    total, done = sum(sizes.values()), sum(sizes[name] for name in output.done if name in sizes)
    for name in _run_units({name: units[name] for name in order}, output):
        done += sizes[name]
        if progress:
            progress("quantizing", done, total)
    for attention, kv in statistics.kv_amax.items():
        for name, tensor in dialect.kv_to_tensors(attention, kv_scales(kv)).items():
            output.write(name, tensor)

    layers = {m: LayerRecord(**record) for name in plan.groups for m, record in output.done[name].items()}
    schemes = {m: linear.scheme for m, linear in plan.linears.items()}
    files = dialect.config_files(_output_config(source, plan), schemes, kept_modules(plan), recipe.kv_cache)
    files["blockscale.json"] = _provenance(recipe, layers, calibration, statistics)
    output.finish(files, source.companions, check=lambda path: _check_result(path, plan))
    num_parameters = sum(math.prod(t.shape) for t in source.tensors.values())
    bits = 8 * output.tensor_bytes / num_parameters
    notices = plan.notices + statistics.notices
    return Summary(output.out, source.num_bytes, output.num_bytes, num_parameters, bits, layers, plan.kept, notices)


def _output_config(source: Source, plan: Plan) -> Mapping[str, Any]:
    """A quantized head is no longer the embedding: loaders that tied the two would leave it out."""
    if not any(module.rpartition(".")[2] == "lm_head" for module in plan.linears):
        return source.config
    untied = {"tie_word_embeddings": False}
    text_config = source.config.get("text_config")
    inner = {"text_config": {**text_config, **untied}} if text_config else {}
    return {**source.config, **inner, **untied}


def output_layout(plan: Plan, recipe: Recipe, kv_modules: tuple[str, ...]) -> Layout:
    """Every tensor of the output in the source's order, from meta tensors that pass through the dialect.

    CheckpointError, before any work, for schemes that the dialect cannot hold.
    """
    dialect = DIALECTS[recipe.dialect]
    by_first: list[tuple[str, dict[str, Tensor]]] = []
    for linear in plan.linears.values():
        weight = empty_like_quantized(linear.shape, linear.scheme.weight, linear.tensor.dtype)
        scalar = torch.empty((), device="meta")
        input_scale = scalar if linear.scheme.needs_input_scale else None
        quantized = QuantizedLinear(linear.scheme, weight, input_scale)
        by_first.append((linear.tensor.name, dialect.to_tensors(linear.module, quantized)))
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


def _source_order(plan: Plan) -> list[str]:
    tensors = [linear.tensor for linear in plan.linears.values()] + list(plan.copied)
    return [t.name for t in sorted(tensors, key=lambda t: (str(t.stored[0].path), t.stored[0].offset))]


def _unit_bytes(plan: Plan) -> dict[str, int]:
    sizes = {name: sum(plan.linears[m].tensor.num_bytes for m in members) for name, members in plan.groups.items()}
    return sizes | {t.name: t.num_bytes for t in plan.copied}


def _run_units(units: Mapping[str, Callable[[], Any]], output: OutputFolder) -> Iterator[str]:
    """Runs the units on a few threads and yields names as they finish and are journalled.

    One torch thread a worker: whole units side by side use the cores better than slices split between them.
    """
    workers = min(_MAX_WORKERS, os.cpu_count() or 1)
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    try:
        running = {pool.submit(unit): name for name, unit in units.items()}
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name = running.pop(future)
                output.mark_done(name, future.result())
                yield name
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _copy_unit(tensor: SourceTensor, output: OutputFolder) -> Callable[[], None]:
    def run_unit() -> None:
        if tensor.is_plain:
            output.copy(tensor.name, tensor.stored[0])
        else:
            output.write(tensor.name, tensor.read())

    return run_unit


def _group_unit(
    plan: Plan,
    members: tuple[str, ...],
    output: OutputFolder,
    dialect: Any,
    statistics: ActivationStatistics,
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
            input_scale = _input_global_scale(linear, input_amax)
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
    if not linears[0].scheme.weight.has_global_scale:
        return None
    amaxes = [weight.abs().amax() for weight in weights]
    for linear, weight, amax in zip(linears, weights, amaxes, strict=True):
        check_finite(weight, amax, linear.tensor.name)
    # dialects store it or its reciprocal: neither may be 0 or infinite
    return global_scale_from_amax(torch.stack(amaxes).amax(), linears[0].method).clamp(min=_MIN_SCALE)


def _input_global_scale(linear: PlannedLinear, amax: float | None) -> Tensor | None:
    if not linear.scheme.needs_input_scale:
        return None
    if amax is None:
        raise RecipeError(f"{linear.module}: no activation statistics", hint="calibrate it, or keep it with --keep")
    assert linear.scheme.activation is not None
    return input_scale(amax, linear.scheme.activation)


def input_scale(amax: float, activation: Format) -> Tensor:
    """fp32 0-d multiplier: amax / 2688 (NVFP4) or amax / 448 (FP8); 1 where nothing but zeros was seen."""
    return _scale(amax / {NVFP4: 6.0 * 448.0, FP8: 448.0}[activation])


def kv_scales(amax: tuple[float, float]) -> KVScales:
    """Of keys and values; 1 where nothing but zeros was seen."""
    return KVScales(*(_scale(a / _KV_BOUND) for a in amax))


def _scale(value: float) -> Tensor:
    # a denormal scale has an infinite reciprocal, which is what engines use
    return torch.tensor(max(value, _MIN_SCALE) if value > 0 else 1.0, dtype=torch.float32)


def _record(linear: PlannedLinear, error: WeightError, input_amax: float | None) -> dict[str, Any]:
    return {
        "format": linear.scheme.weight.name,
        "activation": linear.scheme.activation.name if linear.scheme.activation else None,
        "shape": list(linear.shape),
        "sqnr_db": round(error.sqnr_db, 3) if math.isfinite(error.sqnr_db) else None,
        "input_amax": input_amax,
    }


def _provenance(
    recipe: Recipe, layers: Mapping[str, LayerRecord], calibration: str, statistics: ActivationStatistics
) -> str:
    import transformers

    data = {
        "blockscale": version("blockscale"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "recipe": recipe.to_yaml(),
        "calibration_digest": calibration or None,
        "num_calibration_tokens": statistics.num_tokens,
        "layers": {module: vars(record) for module, record in layers.items()},
    }
    return json.dumps(data, indent=1) + "\n"


def _check_result(path: Path, plan: Plan) -> None:
    """RecipeError unless the written folder reads back as exactly what was planned."""
    try:
        written = open_checkpoint(path)
    except CheckpointError as e:
        raise RecipeError(f"the written checkpoint does not read back: {e}", hint="please report this") from e
    assert written.quantized is not None
    found = {m: (linear.scheme, linear.shape) for m, linear in written.quantized.linears.items()}
    planned = {m: (linear.scheme, tuple(linear.shape)) for m, linear in plan.linears.items()}
    copied = {t.name: (t.dtype, t.shape) for t in plan.copied}
    kept = {n: (t.dtype, t.shape) for n, t in written.kept.items()}
    if found != planned or kept != copied:
        wrong = [m for m in planned if found.get(m) != planned[m]] + [n for n in copied if kept.get(n) != copied[n]]
        raise RecipeError(
            f"the written checkpoint is not what was planned, first at {wrong[:1]}", hint="please report this"
        )
