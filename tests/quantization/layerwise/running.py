"""Layer-wise runs of tiny models on windows of the test's own, and what they wrote."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockscale.checkpoint.linear import QuantizedLinear
from blockscale.checkpoint.load import load_linear
from blockscale.checkpoint.output import OutputFolder
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.checkpoint.source import open_source
from blockscale.quantization import pipeline
from blockscale.quantization.calibration_data import CalibrationData
from blockscale.quantization.layerwise.run import quantize_layers
from blockscale.quantization.plan import kv_modules, make_plan
from blockscale.quantization.recipe import Recipe, load_recipe, with_options
from blockscale.quantization.summary import Summary

SIDE_FILE = "blockscale.json"


def windows(count: int = 11, length: int = 32, seed: int = 4) -> Tensor:
    """Token windows [count, length], by default two batches."""
    return torch.randint(32, 126, (count, length), generator=torch.Generator().manual_seed(seed))


def quantize(
    model: Path,
    out: Path,
    recipe: str | Recipe = "nvfp4-best",
    ids: Tensor | None = None,
    *,
    keep: Sequence[str] = (),
    kv_cache: str | None = None,
    dialect: str | None = None,
    resume: bool = False,
    progress: Any = None,
) -> Summary:
    """What `api.quantize` does once it has windows."""
    chosen = with_options(load_recipe(recipe), tuple(keep), kv_cache, dialect)
    ids = windows() if ids is None else ids
    data = CalibrationData(ids, f"{ids.shape} {ids.sum()}")
    source = open_source(model)
    plan = make_plan(source, chosen)
    caches = kv_modules(source) if chosen.kv_cache else ()
    layout = pipeline.output_layout(plan, chosen, caches)
    job = pipeline.job_digest(source, chosen, data.digest, "cpu")
    with OutputFolder(out, layout, job, resume=resume) as output:
        how = {"with_kv": bool(caches), "progress": progress}
        statistics = quantize_layers(open_checkpoint(model), plan, output, chosen, data, **how)
        return pipeline.run(source, plan, chosen, output, statistics, calibration=data, progress=progress)


def stored_linears(folder: Path) -> dict[str, QuantizedLinear]:
    """As a reader of the checkpoint finds them."""
    checkpoint = open_checkpoint(folder)
    assert checkpoint.quantized is not None
    return {name: load_linear(linear, checkpoint.dtype) for name, linear in checkpoint.quantized.linears.items()}


def is_equal(a: QuantizedLinear, b: QuantizedLinear) -> bool:
    """To the byte, of everything that is stored."""
    parts = [
        (linear.weight.packed, linear.weight.block_scale.view(torch.uint8), linear.weight.global_scale)
        for linear in (a, b)
    ]
    same = all(torch.equal(x, y) for x, y in zip(*parts, strict=True))
    scales = a.input_global_scale, b.input_global_scale
    return same and (scales == (None, None) or torch.equal(*scales))  # type: ignore[arg-type]
