"""Quantizes a model by one of llm-compressor's NVFP4 recipes and saves it in compressed-tensors' format.

    python benchmarks/peers/llmcompressor_rows.py MODEL WINDOWS.pt OUT --recipe NAME [--device cuda] [--text FILE ...]

A recipe is its modifiers, in order, its preset scheme NVFP4 or NVFP4A16 and a weight observer. All else is as the
library sets it: GPTQ's damping 0.01 and static activation order, AWQ's 20 grid points, AutoRound's 200 steps.
"""

import time
from dataclasses import dataclass
from typing import Any

import row
import torch
from compressed_tensors.offload import dispatch_model
from compressed_tensors.quantization.quant_scheme import QuantizationScheme, preset_name_to_scheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.autoround import AutoRoundModifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from row import Job

KEPT = ["lm_head"]
_ROUNDING = {"rtn": QuantizationModifier, "gptq": GPTQModifier}
_BEFORE = {"awq": AWQModifier, "smoothquant": SmoothQuantModifier}


@dataclass(frozen=True)
class Recipe:
    """`before`: transforms of the weights; `rounding`: rtn, gptq or autoround; `observer` None: the library's amax."""

    rounding: str = "rtn"
    observer: str | None = None
    before: tuple[str, ...] = ()
    preset: str = "NVFP4"


_W4A4 = {
    "rtn": Recipe(),
    "mse": Recipe(observer="memoryless_mse"),
    "expanded-mse": Recipe(observer="nvfp4_expanded_mse"),
    "expanded-imatrix": Recipe(observer="nvfp4_expanded_imatrix"),
    "gptq": Recipe("gptq"),
    "gptq-expanded-mse": Recipe("gptq", "nvfp4_expanded_mse"),
    "gptq-expanded-imatrix": Recipe("gptq", "nvfp4_expanded_imatrix"),
    "smoothquant": Recipe(before=("smoothquant",)),
    "awq": Recipe(before=("awq",)),
    "awq-expanded-mse": Recipe(observer="nvfp4_expanded_mse", before=("awq",)),
    "awq-gptq": Recipe("gptq", before=("awq",)),
    "awq-gptq-expanded-mse": Recipe("gptq", "nvfp4_expanded_mse", ("awq",)),
    "awq-gptq-expanded-imatrix": Recipe("gptq", "nvfp4_expanded_imatrix", ("awq",)),
    "autoround": Recipe("autoround"),
}
RECIPES = {
    **_W4A4,
    **{
        f"w4a16-{name}": Recipe(recipe.rounding, recipe.observer, recipe.before, "NVFP4A16")
        for name, recipe in _W4A4.items()
        # SmoothQuant smooths activations, which W4A16 leaves alone; AutoRound knows no NVFP4A16
        if name not in ("smoothquant", "autoround")
    },
}


def modifiers(recipe: Recipe, device: str) -> list[Any]:
    """The library's own modifiers."""
    if recipe.rounding == "autoround":  # knows presets by name alone; compiling is a matter of speed
        is_compiled = device == "cuda"
        return [
            AutoRoundModifier(targets="Linear", scheme=recipe.preset, ignore=KEPT, enable_torch_compile=is_compiled)
        ]
    scheme: QuantizationScheme = preset_name_to_scheme(recipe.preset, ["Linear"])
    if recipe.observer is not None:
        scheme.weights.observer = recipe.observer
    rounding = _ROUNDING[recipe.rounding](config_groups={"group_0": scheme}, ignore=KEPT)
    return [*(_BEFORE[name]() for name in recipe.before), rounding]


def leave_unpinned(cache: IntermediatesCache, batch_index: int, input_names: list[str] | None = None) -> None:
    """In place of the cache's pinning, which AWQ asks for and which needs a GPU; it bears on transfers alone."""


def make(job: Job) -> None:
    recipe = RECIPES[job.recipe]
    model = row.load_model(job, device="cpu")  # the library takes layers to the GPU, where there is one, by itself
    windows = Dataset.from_dict(
        {"input_ids": job.windows.tolist(), "attention_mask": torch.ones_like(job.windows).tolist()}
    )
    started = time.perf_counter()
    oneshot(
        model=model,
        dataset=windows,
        recipe=modifiers(recipe, job.device),
        max_seq_length=job.windows.shape[1],
        num_calibration_samples=len(job.windows),
        batch_size=row.BATCH,
        shuffle_calibration_samples=False,
        log_dir=None,
    )
    seconds = time.perf_counter() - started
    dispatch_model(model)
    probed, texts = row.probe(job, model), row.measure(job, model)
    model.save_pretrained(job.out, save_compressed=True)
    settings = {
        "modifiers": [*recipe.before, recipe.rounding],
        "preset": recipe.preset,
        "observer": recipe.observer or "the preset's",
    }
    row.finish(job, "llm-compressor", seconds, probed, texts, settings)


def main() -> None:
    jobs = row.parse(__doc__, list(RECIPES))
    if jobs[0].device == "cpu":
        IntermediatesCache.pin_memory = leave_unpinned
    row.run(jobs, make)


if __name__ == "__main__":
    main()
