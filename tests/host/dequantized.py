"""A quantized checkpoint turned back into plain fp32 tensors, so that transformers alone can run it as a reference."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from blockscale.checkpoint.load import load_linear
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.formats.tensor import decode


def dequantized_copy(checkpoint_path: Path, target: Path) -> Path:
    """A folder with the weights' exact values in fp32; activations and the cache are no part of it."""
    checkpoint = open_checkpoint(checkpoint_path)
    assert checkpoint.quantized is not None
    tensors = {name: tensor.read().float() for name, tensor in checkpoint.kept.items()}
    for module, stored in checkpoint.quantized.linears.items():
        linear = load_linear(stored, torch.float32)
        weight = decode(linear.weight)
        if linear.pre_quant_scale is not None:  # y = (x * s) W^T
            weight = weight * linear.pre_quant_scale.float()
        if weight.dim() == 3:  # a stack is stored [E, K, N], under its own name
            tensors[module] = weight.transpose(-1, -2).contiguous()
        else:
            tensors[f"{module}.weight"] = weight
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((checkpoint_path / "config.json").read_text())
    config.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(config))
    return target


def transformers_logits(path: Path, ids: Tensor, prepare: Callable[[torch.nn.Module], None] | None = None) -> Tensor:
    """What transformers by itself answers in fp32. `prepare` may hang hooks into the model."""
    import transformers

    family = json.loads((path / "config.json").read_text())["model_type"]
    kinds = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    model = next(k for k in kinds if config in k._model_mapping).from_pretrained(path, dtype=torch.float32)
    if prepare is not None:
        prepare(model)
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits
