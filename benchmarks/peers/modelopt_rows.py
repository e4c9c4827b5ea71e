"""Quantizes a model by one of Model Optimizer's NVFP4 recipes and exports it with its own exporter.

    python benchmarks/peers/modelopt_rows.py MODEL WINDOWS.pt OUT --recipe NAME [--device cuda] [--text FILE ...]

Recipes are Model Optimizer's own configurations and recipe files with their settings as they come; those whose name
begins with w4a16 are the same without the input quantizer. What is exported shares the weights' and the inputs'
global scales and AWQ's smoothing over q/k/v and gate/up, so that is done before the peer's own logits are taken.
"""

import copy
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import modelopt_cpu
import row
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers
from row import Job, Reads

_STATIC = "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG"
_MSE = {"method": "mse", "fp8_scale_sweep": True}
_HESSIAN = {"method": "local_hessian", "fp8_scale_sweep": True}
# its recipe file nvfp4_default-kv_none-gptq: static weight scales, one decoder layer after the other
_GPTQ = {"method": "gptq", "layerwise": {"enable": True}}


def _headroom(weights: Mapping[str, object]) -> dict[str, object]:
    """Its recipe file nvfp4_act_headroom, without the FP8 cache: the activations' global scale from percentiles."""
    return {"method": "nvfp4_act_headroom", "weight_scale_algorithm": dict(weights)}


# name -> (configuration, algorithm in place of its own, whether inputs are quantized)
RECIPES: dict[str, tuple[str, dict[str, object] | None, bool]] = {
    "max": ("NVFP4_DEFAULT_CFG", None, True),
    "mse": (_STATIC, None, True),
    "four-over-six": ("NVFP4_FOUR_OVER_SIX_CFG", None, True),
    "local-hessian": ("NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG", None, True),
    "awq-lite": ("NVFP4_AWQ_LITE_CFG", None, True),
    "awq-clip": ("NVFP4_AWQ_CLIP_CFG", None, True),
    "awq-full": ("NVFP4_AWQ_FULL_CFG", None, True),
    "svdquant": ("NVFP4_SVDQUANT_DEFAULT_CFG", None, True),
    "gptq": (_STATIC, _GPTQ, True),
    "act-headroom": ("NVFP4_DEFAULT_CFG", _headroom({"method": "max"}), True),
    "act-headroom-mse": (_STATIC, _headroom(_MSE), True),
    "act-headroom-local-hessian": (_STATIC, _headroom(_HESSIAN), True),
    "w4a16-max": ("W4A16_NVFP4_CFG", None, False),
    "w4a16-mse": (_STATIC, None, False),
    "w4a16-four-over-six": ("NVFP4_FOUR_OVER_SIX_CFG", None, False),
    "w4a16-local-hessian": ("NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG", None, False),
    "w4a16-awq-lite": ("NVFP4_AWQ_LITE_CFG", None, False),
    "w4a16-gptq": (_STATIC, _GPTQ, False),
}


def configuration(recipe: str) -> dict[str, Any]:
    name, algorithm, has_inputs = RECIPES[recipe]
    config = copy.deepcopy(getattr(mtq, name))
    if algorithm is not None:
        config["algorithm"] = algorithm
    if not has_inputs:
        config["quant_cfg"] = [*config["quant_cfg"], {"quantizer_name": "*input_quantizer", "enable": False}]
    return config


def name_weight_only(folder: Path) -> None:
    """Gives an AWQ export without input scales the name of weight-only NVFP4; the exporter calls both NVFP4_AWQ, which
    has input scales wherever it is read. No tensor changes."""
    for file in ("config.json", "hf_quant_config.json"):
        content = (folder / file).read_text()
        (folder / file).write_text(content.replace('"NVFP4_AWQ"', '"W4A16_NVFP4"'))


def make(job: Job) -> None:
    notes = [modelopt_cpu.NOTE] if job.device == "cpu" else []
    model = row.load_model(job)
    config = configuration(job.recipe)
    started = time.perf_counter()
    model = mtq.quantize(model, config, row.calibrate(job))
    seconds = time.perf_counter() - started
    is_readable = job.recipe != "svdquant"  # whose low-rank branch no other engine reads from the export
    if is_readable:
        requantize_resmooth_fused_llm_layers(model)
    probed, texts = row.probe(job, model), row.measure(job, model)
    export_hf_checkpoint(model, export_dir=job.out)
    if job.recipe == "w4a16-awq-lite":
        name_weight_only(job.out)
        notes.append("quant_algo renamed from NVFP4_AWQ to W4A16_NVFP4: it has no input scales")
    reads = Reads.WHOLE if is_readable else Reads.NOTHING
    row.finish(job, "nvidia-modelopt", seconds, probed, texts, {"algorithm": config["algorithm"]}, notes, reads)


def main() -> None:
    jobs = row.parse(__doc__, list(RECIPES))
    if jobs[0].device == "cpu":
        modelopt_cpu.install()
    row.run(jobs, make)


if __name__ == "__main__":
    main()
