"""One plain function a verb: the only place that joins the rooms of the house."""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from blockscale import texts
from blockscale.checkpoint.locate import demo_gguf, fetch_demo, locate
from blockscale.checkpoint.output import OutputFolder
from blockscale.checkpoint.reader import DIALECTS, Checkpoint, bits_per_parameter, open_checkpoint
from blockscale.checkpoint.source import open_source
from blockscale.checkpoint.target import check_absent
from blockscale.conversion.convert import check_weights, convert_checkpoint, num_quantized
from blockscale.conversion.repair.lint import lint, mend
from blockscale.conversion.summary import ConversionSummary
from blockscale.engine.bench.figures import Row as EngineRow
from blockscale.engine.bench.run import bench_engine as bench_loads
from blockscale.engine.bench.run import workloads
from blockscale.engine.load import load_engine, load_for_bench
from blockscale.engine.options import EngineOptions
from blockscale.engine.sampling import Sampling
from blockscale.errors import UsageError
from blockscale.evaluation.arithmetic import arithmetic, chosen_scale
from blockscale.evaluation.calibrated import language_notices, stored_record
from blockscale.evaluation.gate import check_gates, require_reference
from blockscale.evaluation.layers import layer_errors
from blockscale.evaluation.report import write_report
from blockscale.evaluation.result import Report, TaskComparison
from blockscale.evaluation.run import evaluate_text
from blockscale.evaluation.tasks import compare_tasks, run_tasks
from blockscale.evaluation.windows import token_windows
from blockscale.formats.spec import MXFP4, NVFP4
from blockscale.host.chat_template import chat_renderer
from blockscale.host.model import check_device, load_model, load_tokenizer
from blockscale.inspection.findings import LintReport
from blockscale.inspection.inspect import inspect
from blockscale.inspection.inventory import Inspection
from blockscale.kernels.bench.linear import Row as KernelRow
from blockscale.kernels.bench.run import bench_kernels as bench_shapes
from blockscale.kernels.bench.run import default_device
from blockscale.kernels.selftest.run import self_test
from blockscale.llm import LLM, Completion
from blockscale.planning.hardware import doctor as hardware_doctor
from blockscale.planning.hardware.doctor import Diagnosis
from blockscale.planning.models.model import find_model, linear_shapes
from blockscale.planning.planner import plan
from blockscale.quantization import pipeline
from blockscale.quantization.calibrate import calibrate
from blockscale.quantization.calibration_data import CalibrationData, fitting_window, read_calibration
from blockscale.quantization.layerwise.run import quantize_layers
from blockscale.quantization.learning.stages import learning_steps, quantize_and_learn
from blockscale.quantization.pipeline import Progress
from blockscale.quantization.plan import kv_modules, make_plan
from blockscale.quantization.recipe import Recipe, load_recipe, with_options, without_calibration
from blockscale.quantization.search.mixture import Mixture
from blockscale.quantization.search.search import search_recipe
from blockscale.quantization.self_text import add_self_text
from blockscale.quantization.statistics import ActivationStatistics
from blockscale.quantization.summary import Summary
from blockscale.texts.mix import Source as TextSource


def quantize(
    model: str | Path,
    out: str | Path,
    recipe: str | Path | Recipe | Mixture = "nvfp4",
    *,
    calibration: Sequence[TextSource] = (),
    max_calibration_tokens: int | None = None,
    calibration_seed: int = 0,
    keep: Sequence[str] = (),
    kv_cache: str | None = None,
    dialect: str | None = None,
    device: str = "cpu",
    resume: bool = False,
    strict: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Writes `model` (folder, .gguf, hub id or `demo`) to the folder `out` as `recipe` (or `search_recipe`) says.

    calibration   texts as `texts.read_text` takes them, or "self" for what the model itself writes, "text:weight" or
                  (text, weight) for a mix; without any, a recipe with a method takes "self", and for others
                  activations whose scale must be calibrated stay in 16 bits: the summary's notices say so
    max_calibration_tokens   65536 by default, and of "self" on a CPU 16384
    calibration_seed   0 takes evenly spaced windows of the texts, any other draws them; "self" is drawn by it too
    keep          globs of modules that stay in 16 bits
    resume        take up the work of a killed run of the same job
    strict        a weight whose shape does not fit its format is an error

    The folder appears whole or not at all. Raises BlockscaleError's subclasses.
    """
    out = Path(out)
    check_device(device)
    check_absent(out)
    search = recipe.record() if isinstance(recipe, Mixture) else None
    recipe = recipe.recipe if isinstance(recipe, Mixture) else recipe
    chosen = with_options(load_recipe(recipe), tuple(keep), kv_cache, dialect)
    path = locate(model)
    source = open_source(path)
    notices: tuple[str, ...] = ()
    data: CalibrationData | None = None
    if chosen.needs_calibration and (calibration or chosen.method is not None):
        data = read_calibration(
            calibration, load_tokenizer(path), source.config, max_calibration_tokens, calibration_seed, device
        )
    elif chosen.needs_calibration:
        chosen, notices = without_calibration(chosen)
    elif calibration:
        notices = (f"recipe {chosen.name} has no scale to calibrate: the calibration text is not used",)
    plan = make_plan(source, chosen, strict=strict)
    caches = kv_modules(source) if chosen.kv_cache else ()
    layout = pipeline.output_layout(plan, chosen, caches)
    job = pipeline.job_digest(source, chosen, data.digest if data else "", device)

    def run(target: Path) -> tuple[Summary, CalibrationData | None]:
        own = data
        with OutputFolder(target, layout, job, resume=resume) as output:
            statistics = ActivationStatistics(notices=notices)
            if own is not None:
                state = output.state_path("self_text")
                own = add_self_text(own, path, device=device, folder=state, progress=progress)
                checkpoint = open_checkpoint(path)
                how: dict[str, Any] = {"with_kv": bool(caches), "device": device, "progress": progress}
                if chosen.method is not None:
                    statistics = quantize_layers(checkpoint, plan, output, chosen, own, **how)
                else:
                    state = output.state_path("calibration")
                    statistics = calibrate(checkpoint, own, plan.linears, state_folder=state, **how)
            more: dict[str, Any] = {"calibration": own, "search": search, "device": device, "progress": progress}
            return pipeline.run(source, plan, chosen, output, statistics, **more), own

    if data is None or not learning_steps(chosen):
        return run(out)[0]
    return quantize_and_learn(
        out, run, open_checkpoint(path), plan, data, chosen, job=job, device=device, resume=resume, progress=progress
    )


def convert(
    model: str | Path,
    out: str | Path,
    to: str,
    *,
    format: str | None = None,
    kept: str = "bf16",
    progress: Progress | None = None,
) -> ConversionSummary:
    """Writes a checkpoint (folder, .gguf or hub id) in another form.

    to       "modelopt" or "compressed-tensors": a folder with the same codes and block scales; gpt-oss' MXFP4 becomes
             NVFP4, and weights in FP8 tiles are quantized anew, which rounds
             "bf16": a plain model of the checkpoint's own 16-bit type; "gguf": one file for llama.cpp
    format   "nvfp4": store MXFP4 weights as NVFP4, in a dialect
    kept     what a GGUF stores matrices as that are not quantized: "bf16", "f16" or "q8_0"

    The result appears whole or not at all. Raises BlockscaleError's subclasses.
    """
    out = Path(out)
    _check_conversion(to, format, kept)
    check_absent(out)
    checkpoint = open_checkpoint(locate(model))
    if to == "gguf":
        return _to_gguf(checkpoint, out, kept, progress)
    if to in DIALECTS and checkpoint.folder.method == "fp8":
        return _quantized_anew(checkpoint, out, to, progress)
    return convert_checkpoint(checkpoint, out, to, cast_mxfp4=format is not None, progress=progress)


def _check_conversion(to: str, format: str | None, kept: str) -> None:
    targets = (*DIALECTS, "gguf", "bf16")
    if to not in targets:
        raise UsageError(f"nothing is converted to '{to}'", hint="targets: " + ", ".join(targets))
    if format not in (None, "nvfp4"):
        raise UsageError(f"nothing is converted to the format '{format}'", hint="formats: nvfp4, from MXFP4")
    if format is not None and to not in DIALECTS:
        raise UsageError(f"--format {format} is for a dialect, not for {to}", hint="targets: " + ", ".join(DIALECTS))
    if kept != "bf16" and to != "gguf":
        raise UsageError(f"--kept {kept} is for --to gguf alone", hint="a dialect keeps 16-bit tensors as they are")


def _to_gguf(checkpoint: Checkpoint, out: Path, kept: str, progress: Progress | None) -> ConversionSummary:
    from blockscale.conversion.gguf.write import write_gguf  # a library of its own

    check_weights(checkpoint)
    result = write_gguf(checkpoint, out, progress, kept=kept)
    own = {"bf16": torch.bfloat16, "f16": torch.float16}.get(kept)
    linears = checkpoint.quantized.linears.values() if checkpoint.quantized else ()
    is_copied = all(linear.scheme.weight in (NVFP4, MXFP4) for linear in linears)
    is_copied = is_copied and all(t.dtype == own for t in checkpoint.kept.values() if len(t.shape) > 1)
    return ConversionSummary(
        result.path,
        "gguf",
        checkpoint.folder.num_bytes,
        result.num_bytes,
        num_quantized(checkpoint),
        is_copied and not result.notices,
        {},
        result.notices,
    )


def _quantized_anew(checkpoint: Checkpoint, out: Path, to: str, progress: Progress | None) -> ConversionSummary:
    """FP8 in tiles has no place in a dialect."""
    summary = quantize(checkpoint.path, out, "nvfp4-w4a16", dialect=to, progress=progress)
    sqnrs = {name: layer.sqnr_db for name, layer in summary.layers.items() if layer.sqnr_db is not None}
    errors = {name: 10 ** (-sqnr / 20) for name, sqnr in sqnrs.items()}
    notice = "FP8 weights were quantized anew, by recipe nvfp4-w4a16: the errors are against their FP8 values"
    return ConversionSummary(
        summary.out,
        to,
        checkpoint.folder.num_bytes,
        summary.num_bytes,
        num_quantized(checkpoint),
        not errors,
        errors,
        (notice, *summary.notices),
    )


def evaluate(
    model: str | Path,
    reference: str | Path | None = None,
    *,
    text: Sequence[str | Path] = texts.EVALUATION,
    tasks: Sequence[str] = (),
    window: int | None = None,
    stride: int | None = None,
    start: float = 0.0,
    max_tokens: int | None = 20_480,
    task_limit: int | None = None,
    batch_size: int = 4,
    weights_only: bool = False,
    activation_scale: str | None = None,
    device: str = "cpu",
    max_kl: float | None = None,
    max_perplexity_ratio: float | None = None,
    report: str | Path | None = None,
    progress: Progress | None = None,
) -> Report:
    """Measures a checkpoint on texts and tasks and, with `reference`, what separates it from the 16-bit model.

    text           files or own texts' names; each is measured by itself
    window ...     how texts are cut: see `blockscale.evaluation.windows`; by default 512 tokens, or the model's context
    weights_only   leave activations and the KV cache in 16 bits although the checkpoint rounds them
    activation_scale   how block scales of NVFP4 activations are chosen: "amax" is what other engines do; by default as
                   the checkpoint says
    max_kl, max_perplexity_ratio   limits for every text; CheckFailed beyond them, after `report` is written
    report         where to write an HTML page
    """
    check_device(device)
    require_reference(reference is not None, max_kl, max_perplexity_ratio)
    method = chosen_scale(activation_scale, weights_only)
    path = locate(model)
    candidate = load_model(path, device=device, emulate_activations=not weights_only, activation_scale=method)
    tokenizer = load_tokenizer(path)
    reference_path = locate(reference) if reference is not None else None
    base = load_model(reference_path, device=device) if reference_path is not None else None
    window = fitting_window(window, candidate.checkpoint.folder.config, num_before=1)  # BOS comes on top
    render, record = chat_renderer(tokenizer), stored_record(path)
    results, convention, notices = [], "", []
    for source in text:
        content = texts.read_text(source, render)
        windows = token_windows(content.content, tokenizer.encode, window, stride, start, max_tokens)
        _check_same_tokens(content.content, tokenizer, reference_path)
        convention = windows.convention
        notices += [*content.notices, *language_notices(content, start, windows.num_tokens, record)]
        report_windows = _staged(progress, f"evaluating {content.name}")
        logits = base.logits if base is not None else None
        results.append(evaluate_text(content.name, windows, candidate.logits, logits, batch_size, report_windows))
    task_results = run_tasks(candidate.model, tokenizer, tasks, task_limit) if tasks else []
    comparisons: list[TaskComparison] = []
    if tasks and base is not None:
        comparisons = compare_tasks(task_results, run_tasks(base.model, tokenizer, tasks, task_limit))
    folder = candidate.checkpoint.folder
    result = Report(
        model=str(model),
        reference=None if reference is None else str(reference),
        texts=tuple(results),
        layers=layer_errors(candidate.checkpoint, base.checkpoint, _staged(progress, "comparing layers"))
        if base is not None
        else (),
        tasks=tuple(task_results),
        task_comparisons=tuple(comparisons),
        convention=f"{convention} {arithmetic(candidate, weights_only)}".strip(),
        recipe=str(record.get("recipe", "")),
        notices=tuple(notices),
        versions={name: version(name) for name in ("blockscale", "torch", "transformers")},
        bytes=folder.num_bytes,
        bits_per_parameter=bits_per_parameter(candidate.checkpoint),
        date=datetime.date.today().isoformat(),
    )
    if report is not None:
        write_report(result, report)
    if max_kl is not None or max_perplexity_ratio is not None:
        check_gates(result, max_kl, max_perplexity_ratio)
    return result


def _staged(progress: Progress | None, stage: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(stage, done, total)


def _check_same_tokens(content: str, tokenizer: Any, reference_path: Path | None) -> None:
    """Divergence means something only between models that see the same tokens."""
    if reference_path is None:
        return
    sample = content[:2000]
    if load_tokenizer(reference_path).encode(sample) != tokenizer.encode(sample):
        raise UsageError(
            "the model and its reference tokenize text differently", hint="give the model it was made from"
        )


def doctor(gpu: str | None = None, *, self_tests: bool = True, **versions: str | None) -> Diagnosis:
    """What a machine runs natively and what it emulates; of this machine also which kernel serves each op.

    gpu         asks about a GPU of the catalogue or of a .toml file instead
    self_tests  each kernel is held against plain torch, which takes a few seconds
    """
    diagnosis = hardware_doctor.doctor(gpu, **versions)
    if gpu is not None:
        return diagnosis
    return replace(diagnosis, ops=tuple(verdict.to_dict() for verdict in self_test(is_run=self_tests)))


def bench_kernels(
    shapes: Sequence[tuple[int, int]] = (), *, model: str | None = None, **options: Any
) -> list[KernelRow]:
    """Times of the linears' kernels at [N, K] of `shapes` and of `model`; the options are those of bench/run."""
    own = linear_shapes(find_model(model)) if model is not None else ()
    return bench_shapes(tuple(dict.fromkeys((*shapes, *own))), **options)


def bench_engine(
    model: str | Path | None = None,
    *,
    input_tokens: int = 1024,
    output_tokens: int = 128,
    concurrency: Sequence[int] = (1,),
    rates: Sequence[float] = (),
    num_requests: int | None = None,
    seed: int = 0,
    num_draft: int = 0,
    device: str | None = None,
    tensor_parallel: int = 1,
    **options: Any,
) -> list[EngineRow]:
    """Whole requests through the engine, a row a load: so many at once, or so many a second that come by chance.

    The options are those of engine/bench/run: `random`, `weights`, `kv_cache`, `progress`.
    """
    check_device(default_device() if device is None else device)
    loads = workloads(input_tokens, output_tokens, concurrency, rates, num_requests, seed)
    checkpoint = None if model is None else locate(model)
    engine = EngineOptions(num_draft=num_draft, tensor_parallel=tensor_parallel)
    load = partial(load_for_bench, tensor_parallel=tensor_parallel)
    return bench_loads(load, loads, checkpoint=checkpoint, device=device, options=engine, **options)


__all__ = [
    "LLM",
    "Completion",
    "ConversionSummary",
    "EngineOptions",
    "Inspection",
    "LintReport",
    "Report",
    "Sampling",
    "Summary",
    "bench_engine",
    "bench_kernels",
    "check_gates",
    "convert",
    "demo_gguf",
    "doctor",
    "evaluate",
    "fetch_demo",
    "inspect",
    "lint",
    "load_engine",
    "load_recipe",
    "locate",
    "mend",
    "plan",
    "quantize",
    "require_reference",
    "search_recipe",
]
