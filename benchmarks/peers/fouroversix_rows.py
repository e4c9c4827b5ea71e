"""Quantizes a model by fouroversix' block scale rules, weights and activations, without calibration.

    python benchmarks/peers/fouroversix_rows.py MODEL WINDOWS.pt OUT --recipe NAME [--device cuda] --text FILE ...

The package rounds activations with the amax of each call, by the same rule as the weights; no checkpoint says that to
another engine. So OUT holds its weights, byte for byte, as weight-only NVFP4 in Model Optimizer's dialect, and what a
W4A4 row costs is measured here, with --text, in the package's own rounding. Windows are not used but for the probe.
Each product is formed from what its quantizer gives, in fp32 as its Blackwell kernels do; its reference matmul would
round them to fp16 on the way.
"""

import time
from pathlib import Path
from typing import Any

import row
import torch
from fouroversix import QuantizationConfig, ScaleRule, dequantize, quantize_to_fp4
from fouroversix.quantize import QuantizedTensor
from fouroversix.quantize.dequantize_utils import from_blocked
from row import Job, Reads
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig

_RULES = {"mse": ScaleRule.mse, "mae": ScaleRule.mae, "abs-max": ScaleRule.abs_max, "static-6": ScaleRule.static_6}
# name -> (rule, whether inputs are rounded)
RECIPES = {**{name: (rule, True) for name, rule in _RULES.items()}, "w4a16-mse": (ScaleRule.mse, False)}
KEPT = ["lm_head"]  # as the package leaves it by default


def values(quantized: QuantizedTensor) -> Tensor:
    """fp32 [N, K]."""
    rows, columns = quantized.original_shape
    whole = dequantize(quantized, dtype=torch.float32, intermediate_dtype=torch.float32)
    return whole.reshape(quantized.padded_shape)[:rows, :columns] if whole.shape != (rows, columns) else whole


def stored(quantized: QuantizedTensor, largest_scale: int) -> dict[str, Tensor]:
    """The tensors of Model Optimizer's dialect: padding cut off, block scales in rows."""
    rows, columns = quantized.original_shape
    padded_rows, padded_columns = quantized.padded_shape
    scales = from_blocked(quantized.scale_factors, (padded_rows, padded_columns // 16))
    return {
        "weight": quantized.values.reshape(padded_rows, -1)[:rows, : columns // 2].contiguous(),
        "weight_scale": scales[:rows, : columns // 16].contiguous(),
        "weight_scale_2": (quantized.amax.float() / (6 * largest_scale)).reshape(()),
    }


def quantize(model: nn.Module, rule: ScaleRule, has_inputs: bool) -> dict[str, Tensor]:
    """Rounds every linear of `model` in place, weights now and inputs as they come; what is to be stored, by name."""
    config = QuantizationConfig(scale_rule=rule)

    def rounded(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x = inputs[0]
        flat = x.reshape(-1, x.shape[-1])
        return (values(quantize_to_fp4(flat, config)).reshape(x.shape).to(x.dtype), *inputs[1:])

    tensors = {}
    largest_scale = 448 if rule.is_static else 256
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name in KEPT:
            continue
        quantized = quantize_to_fp4(module.weight.data, config)
        tensors |= {f"{name}.{k}": v.cpu() for k, v in stored(quantized, largest_scale).items()}
        module.weight.data = values(quantized).to(module.weight.dtype)
        if has_inputs:
            module.register_forward_pre_hook(rounded)
    return tensors


def save(out: Path, model: nn.Module, tensors: dict[str, Tensor], config: Any) -> None:
    """The folder of a weight-only NVFP4 model."""
    out.mkdir(parents=True)
    kept = {k: v.cpu().contiguous() for k, v in model.state_dict().items() if k not in tensors}
    if config.tie_word_embeddings:
        kept.pop("lm_head.weight", None)
    save_file({**kept, **tensors}, out / "model.safetensors", metadata={"format": "pt"})
    config.quantization_config = {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "ignore": KEPT,
        "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}
        },
        "producer": {"name": "fouroversix", "version": row.installed()["fouroversix"]},
    }
    config.save_pretrained(out)


def make(job: Job) -> None:
    rule, has_inputs = RECIPES[job.recipe]
    model = row.load_model(job)
    started = time.perf_counter()
    with torch.no_grad():
        tensors = quantize(model, rule, has_inputs)
    seconds = time.perf_counter() - started
    probed, texts = row.probe(job, model), row.measure(job, model)
    save(job.out, model, tensors, AutoConfig.from_pretrained(job.model))
    settings = {"scale_rule": rule.value, "activations": f"{rule.value}, amax of each call" if has_inputs else None}
    reads = Reads.WEIGHTS if has_inputs else Reads.WHOLE
    row.finish(job, "fouroversix", seconds, probed, texts, settings, reads=reads)


if __name__ == "__main__":
    row.run(row.parse(__doc__, list(RECIPES)), make)
