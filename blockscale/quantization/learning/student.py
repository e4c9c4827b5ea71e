"""A quantized checkpoint that runs with whatever codes, scales and gains it is given, and gives gradients by them.

What is not being learned runs as it does in evaluation: the same modules, the same arithmetic.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as run_again

from blockscale.checkpoint.reader import Checkpoint
from blockscale.errors import CheckpointError
from blockscale.formats.packing import unpack_nibbles
from blockscale.formats.spec import NVFP4
from blockscale.host.linear import PackedLinear
from blockscale.host.model import HostedModel, load_model
from blockscale.host.skeleton import checkpoint_names, decoder_layers

Values = Mapping[str, Tensor]
_KEPT_BYTES = 2 * 4  # fp32


@dataclass(frozen=True)
class Student:
    """`hosted`, with places for what is learned.

    linears  stored module name -> NVFP4 linear
    gains    stored tensor name -> the norm that has it, and its dtype on disk
    paths    stored module name -> name in the model, of `linears`
    """

    hosted: HostedModel
    linears: Mapping[str, PackedLinear]
    gains: Mapping[str, tuple[nn.Module, torch.dtype]]
    paths: Mapping[str, str]

    @property
    def checkpoint(self) -> Checkpoint:
        return self.hosted.checkpoint

    def stored(self) -> dict[str, tuple[Tensor, Tensor]]:
        """(codes uint8 [..., K], block_scale float8_e4m3fn [..., K/16]) of each linear, as stored."""
        weights = {name: linear.linear.weight for name, linear in self.linears.items()}
        return {name: (unpack_nibbles(w.packed), w.block_scale) for name, w in weights.items()}

    def gain_values(self) -> dict[str, Tensor]:
        """As they are now, in their dtypes on disk."""
        return {name: module.weight.detach().to(dtype) for name, (module, dtype) in self.gains.items()}  # type: ignore[operator]

    def logits(self, ids: Tensor, values: Values) -> Tensor:
        """Token ids [B, T] -> [B * T, V] in the model's dtype, under `values`: of each linear fp32, decoded without its
        global scale, and of each gain. They stay in the model until the next call: going backward may need them."""
        for name, linear in self.linears.items():
            linear.learning = values[name]
        for name, (module, _) in self.gains.items():
            module.weight = values[name].to(module.weight.dtype)  # type: ignore[arg-type]
        return run_logits(self.hosted, ids)

    def activation_bytes(self, num_tokens: int) -> int:
        """About what layers keep for going backward: each linear's input and output, and as much again beside them."""
        width = sum(linear.in_features + linear.out_features for linear in self.linears.values())
        return _KEPT_BYTES * num_tokens * width

    def recompute_layers(self) -> None:
        """From now on each decoder layer keeps only its input and runs once more going backward."""
        _, layers = decoder_layers(self.hosted.model)
        for index, layer in enumerate(layers):
            layers[index] = _RunAgain(layer)


def run_logits(hosted: HostedModel, ids: Tensor) -> Tensor:
    """Token ids [B, T] -> [B * T, V] in the model's dtype."""
    logits: Tensor = hosted.model(input_ids=ids.to(hosted.device), use_cache=False).logits
    return logits.flatten(0, 1)


def open_student(path: Path, device: str) -> Student:
    """CheckpointError if nothing in it is NVFP4, ModelError for an architecture that transformers lacks."""
    hosted = load_model(path, device=device)
    model, checkpoint = hosted.model, hosted.checkpoint
    stored = checkpoint.quantized.linears if checkpoint.quantized else {}
    names = checkpoint_names(model, [*checkpoint.kept, *(f"{module}.weight" for module in stored)])
    modules = dict(model.named_modules())
    linears, paths = {}, {}
    for module in stored:
        path_in_model = names[f"{module}.weight"].removesuffix(".weight")
        found = modules.get(path_in_model)
        if isinstance(found, PackedLinear) and found.linear.weight.format is NVFP4:
            linears[module], paths[module] = found, path_in_model
    if not linears:
        raise CheckpointError(f"{path} has no NVFP4 linear to learn", hint="quantize the model to NVFP4 first")
    gains = {}
    for name, tensor in checkpoint.kept.items():
        owner = modules.get(names[name].removesuffix(".weight"))
        # a vector called weight is a norm's: linears, embeddings and convolutions have matrices
        if name.endswith(".weight") and len(tensor.shape) == 1 and owner is not None and tensor.is_plain:
            _free_gain(owner)
            gains[name] = (owner, tensor.dtype)
    return Student(hosted, linears, gains, paths)


def _free_gain(module: nn.Module) -> None:
    """A parameter takes no tensor that has a history; a buffer does."""
    value = module.weight
    if isinstance(value, nn.Parameter):
        del module.weight
        module.register_buffer("weight", value.detach())


class _RunAgain(nn.Module):
    """Stands for a decoder layer; between forward and backward only its input is held."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        """Models look at attributes of their layers, such as the kind of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.layer(*args, **kwargs)
        return run_again(self.layer, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
