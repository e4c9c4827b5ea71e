"""A checkpoint as a running transformers model, its quantized weights packed in memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.checkpoint.load import load_kv_scales
from blockscale.checkpoint.reader import Checkpoint, open_checkpoint
from blockscale.errors import ModelError, UsageError
from blockscale.host import attention
from blockscale.host.skeleton import build_skeleton, load_config
from blockscale.host.weights import HostedWeights, host_weights, materialize


@dataclass(frozen=True)
class HostedModel:
    """`model` is a transformers causal language model; `checkpoint` is what it was loaded from.

    activation_scale  how block scales of NVFP4 inputs are chosen where they are rounded
    """

    checkpoint: Checkpoint
    model: Any
    device: torch.device
    activation_scale: ActivationScale = ActivationScale.AMAX

    @torch.inference_mode()
    def logits(self, input_ids: Tensor) -> Tensor:
        """Token ids [B, T] -> fp32 logits [B, T, V]."""
        check_ids(input_ids, self.model)
        return self.model(input_ids=input_ids.to(self.device), use_cache=False).logits.float()


def check_device(device: str) -> None:
    """UsageError for one that this machine lacks."""
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise UsageError(f"device '{device}' is not available", hint="cpu, or cuda where torch sees a GPU")


def check_ids(ids: Tensor, model: Any) -> None:
    """ModelError for tokens that the model has no embedding for."""
    count = model.get_input_embeddings().weight.shape[0]
    if ids.numel() and int(ids.max()) >= count:
        raise ModelError(
            f"the tokenizer gives token {int(ids.max())}, the model knows {count}",
            hint="tokenizer and model do not belong together",
        )


def load_model(
    path: Path,
    *,
    device: str = "cpu",
    emulate_activations: bool = True,
    activation_scale: ActivationScale | None = None,
) -> HostedModel:
    """Loads a checkpoint of any dialect, or a 16-bit model.

    On the CPU arithmetic is fp32 whatever the weights are stored in; elsewhere it is the checkpoint's own type.
    emulate_activations   round linears' inputs and the KV cache as the scheme says (W4A4); else weights only
    activation_scale      how block scales of NVFP4 inputs are chosen; by default as the checkpoint says
    ModelError for an architecture that transformers lacks or weights that do not fit it.
    """
    checkpoint = open_checkpoint(path)
    config = load_config(path)
    dtype = torch.float32 if device == "cpu" else checkpoint.dtype
    quantized = checkpoint.quantized
    has_kv = emulate_activations and quantized is not None and bool(quantized.kv_tensors)
    model: Any = build_skeleton(config, dtype, with_kv_transforms=has_kv)
    weights = host_weights(model, checkpoint, is_emulating=emulate_activations, activation_scale=activation_scale)
    materialize(model, weights)
    model.tie_weights()
    if has_kv:
        _round_kv_cache(model, weights)
    model.generation_config = read_generation_config(path) or model.generation_config
    return HostedModel(checkpoint, model.to(device), torch.device(device), weights.activation_scale)


def _round_kv_cache(model: Any, weights: HostedWeights) -> None:
    """Gives each attention module that has scales the rounding of its cache."""
    quantized = weights.checkpoint.quantized
    assert quantized is not None
    own_names = {stored: own for own, stored in weights.stored.items()}
    for name, infos in quantized.kv_tensors.items():
        module = model.get_submodule(own_names[f"{name}.k_proj"].removesuffix(".k_proj"))
        module.kv_transform = attention.kv_rounding(load_kv_scales(infos), quantized.kv_format or "fp8")


def load_tokenizer(path: Path) -> Any:
    """ModelError if the folder has none that transformers can read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as e:
        raise ModelError(f"{path}: no tokenizer that transformers can read", hint="copy tokenizer.json there") from e


def read_generation_config(path: Path) -> Any:
    """The folder's GenerationConfig, special tokens only: penalties, beams or a top-k that the file asks for would
    change what temperature 0 means. None where there is no file; ModelError for one that cannot be read."""
    from transformers import GenerationConfig

    if not (path / "generation_config.json").is_file():
        return None
    try:
        stored = GenerationConfig.from_pretrained(path)
    except (ValueError, TypeError, OSError) as e:
        raise ModelError(f"{path}: generation_config.json is not readable", hint="mend or remove it") from e
    tokens = {name: getattr(stored, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return GenerationConfig(**tokens)
