"""One plain function a verb: the only place that joins the rooms of the house."""

from collections.abc import Sequence
from pathlib import Path

import torch

from blockscale import texts
from blockscale.checkpoint.locate import locate
from blockscale.checkpoint.output import OutputFolder, check_absent
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.checkpoint.source import Source, open_source
from blockscale.errors import RecipeError, UsageError
from blockscale.formats.error import sqnr
from blockscale.host.model import load_tokenizer
from blockscale.quantize import pipeline
from blockscale.quantize.calibrate import MAX_TOKENS, CalibrationData, calibrate, tokenize
from blockscale.quantize.pipeline import Progress, Summary
from blockscale.quantize.plan import make_plan
from blockscale.quantize.recipe import Recipe, load_recipe, with_options, without_static_activations
from blockscale.quantize.statistics import ActivationStatistics
from blockscale.quantize.weight import quantize_tensor


def quantize(
    model: str | Path,
    out: str | Path,
    recipe: str | Path | Recipe = "nvfp4",
    *,
    calibration: Sequence[str | Path] = (),
    max_calibration_tokens: int = MAX_TOKENS,
    keep: Sequence[str] = (),
    kv_cache: str | None = None,
    dialect: str | None = None,
    device: str = "cpu",
    resume: bool = False,
    strict: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Writes `model` (folder, .gguf, hub id or `demo`) to the folder `out` as `recipe` says.

    calibration   text files or own texts' names; without any, activations whose scale must be calibrated stay in
                  16 bits, and the summary's notices say so
    keep          globs of modules that stay in 16 bits
    resume        take up the work of a killed run of the same job
    strict        a weight whose shape does not fit its format is an error

    The folder appears whole or not at all. Raises BlockscaleError's subclasses.
    """
    out = Path(out)
    check_device(device)
    check_absent(out)
    chosen = with_options(load_recipe(recipe), tuple(keep), kv_cache, dialect)
    path = locate(model)
    source = open_source(path)
    notices: tuple[str, ...] = ()
    data: CalibrationData | None = None
    if calibration and chosen.needs_calibration:
        data = tokenize([texts.read_text(t) for t in calibration], load_tokenizer(path), max_calibration_tokens)
    elif chosen.needs_calibration:
        chosen, notices = _without_calibration(chosen)
    plan = make_plan(source, chosen, strict=strict)
    kv_modules = _kv_modules(source, chosen)
    layout = pipeline.output_layout(plan, chosen, kv_modules)
    digest = data.digest if data else ""
    job = pipeline.job_digest(source, chosen, digest)
    with OutputFolder(out, layout, job, resume=resume) as output:
        statistics = ActivationStatistics(notices=notices)
        if data is not None:
            statistics = calibrate(
                open_checkpoint(path),
                data,
                plan.linears,
                with_kv=bool(kv_modules),
                device=device,
                state_path=output.state_path("calibration.safetensors"),
                progress=progress,
            )
        return pipeline.run(
            source, plan, chosen, output, statistics, calibration=digest, device=device, progress=progress
        )


def check_device(device: str) -> None:
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise UsageError(f"device '{device}' is not available", hint="cpu, or cuda where torch sees a GPU")


def _without_calibration(recipe: Recipe) -> tuple[Recipe, tuple[str, ...]]:
    if recipe.kv_cache is not None:
        raise RecipeError("KV-cache scales need calibration text", hint="add --calibration FILE")
    notice = "no calibration text: activations stay in 16 bits (W4A16); give --calibration FILE for W4A4"
    return without_static_activations(recipe), (notice,)


def _kv_modules(source: Source, recipe: Recipe) -> tuple[str, ...]:
    """Attention modules whose cache gets scales: those with a k_proj and a v_proj."""
    if recipe.kv_cache is None:
        return ()
    suffix = ".k_proj.weight"
    found = tuple(n.removesuffix(suffix) for n in source.tensors if n.endswith(suffix))
    if not found:
        raise RecipeError("the model has no k_proj and v_proj to attach KV-cache scales to", hint="drop --kv-cache")
    return found


__all__ = ["Summary", "quantize", "quantize_tensor", "sqnr"]
