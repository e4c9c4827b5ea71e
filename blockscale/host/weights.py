"""Puts a checkpoint's tensors into a skeleton, all of it or one submodule at a time."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from blockscale.checkpoint.dialects.stored import StoredLinear, load_linear
from blockscale.checkpoint.reader import Checkpoint
from blockscale.checkpoint.source import SourceTensor
from blockscale.errors import ModelError
from blockscale.host.experts import HostedExperts, is_fused_experts
from blockscale.host.linear import KeptLinear, PackedLinear
from blockscale.host.skeleton import checkpoint_names


@dataclass(frozen=True)
class HostedWeights:
    """A checkpoint's contents under the model's own names.

    kept      16-bit tensors by parameter name
    packed    quantized linears by module name
    stored    module name in the model -> module name in the checkpoint
    """

    checkpoint: Checkpoint
    kept: Mapping[str, SourceTensor]
    packed: Mapping[str, StoredLinear]
    stored: Mapping[str, str]
    is_emulating: bool


def host_weights(model: Any, checkpoint: Checkpoint, *, is_emulating: bool) -> HostedWeights:
    """Maps names and gives fused experts a place for each expert's linears."""
    linears = checkpoint.quantized.linears if checkpoint.quantized else {}
    # renamings are written for parameter names, so a packed linear asks for its weight's
    weight_names = {f"{module}.weight": module for module in linears}
    renamed = checkpoint_names(model, [*checkpoint.kept, *weight_names])
    kept = {renamed[name]: tensor for name, tensor in checkpoint.kept.items()}
    packed = {renamed[name].removesuffix(".weight"): linears[module] for name, module in weight_names.items()}
    stored = {new.removesuffix(".weight"): old.removesuffix(".weight") for old, new in renamed.items()}
    _unfuse_experts(model, {*kept, *(f"{module}.weight" for module in packed)})
    return HostedWeights(checkpoint, kept, packed, stored, is_emulating)


def _unfuse_experts(model: nn.Module, names: set[str]) -> None:
    for path, module in list(model.named_modules()):
        if is_fused_experts(module):
            below = {name.removeprefix(path + ".") for name in names if name.startswith(path + ".")}
            _set_module(model, path, HostedExperts(module, below))


def materialize(model: nn.Module, weights: HostedWeights, path: str = "", *, skip: str | None = None) -> nn.Module:
    """Fills the submodule at `path` in place, but not the one at `skip`, and returns it.

    Linears become PackedLinear or KeptLinear; every other parameter is read and cast to the skeleton's dtype.
    ModelError if the checkpoint lacks a parameter.
    """
    root = model.get_submodule(path)
    prefix = path + "." if path else ""

    def is_skipped(name: str) -> bool:
        return skip is not None and name.startswith(skip + ".")

    for name, module in list(root.named_modules()):
        full = prefix + name
        if is_skipped(full + "."):
            continue
        replacement = _linear(module, full, weights)
        if replacement is not None:
            _set_module(root, name, replacement)
    missing = []
    for name, parameter in list(root.named_parameters()):
        full = prefix + name
        if not parameter.is_meta or is_skipped(full):
            continue
        tensor = weights.kept.get(full)
        if tensor is None:
            missing.append(full)
        elif tuple(tensor.shape) != tuple(parameter.shape):
            raise ModelError(f"{full}: the checkpoint has {list(tensor.shape)}, the model {list(parameter.shape)}")
        else:
            _set_parameter(root, name, tensor.read().to(parameter.dtype))
    for name, buffer in list(root.named_buffers()):  # persistent ones; the others were computed
        full = prefix + name
        if buffer.is_meta and not is_skipped(full):
            if full in weights.kept:
                _set_buffer(root, name, weights.kept[full].read())
            else:
                missing.append(full)
    _check_missing(model, missing)
    return root


def materialized_copy(model: nn.Module, weights: HostedWeights, path: str) -> nn.Module:
    """The submodule at `path` with weights, as a copy: the skeleton stays empty and the copy can be dropped."""
    parent, _, leaf = path.rpartition(".")
    holder = model.get_submodule(parent)
    empty = getattr(holder, leaf) if not leaf.isdigit() else holder[int(leaf)]  # type: ignore[index]
    _set_module(model, path, copy.deepcopy(empty))
    try:
        return materialize(model, weights, path)
    finally:
        _set_module(model, path, empty)


def _check_missing(model: nn.Module, missing: list[str]) -> None:
    """A head tied to the embedding has no tensor of its own."""
    tied = getattr(model, "_tied_weights_keys", None) or {}
    is_tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)  # type: ignore[operator, union-attr]
    missing = [name for name in missing if not (is_tied and name in tied)]
    if missing:
        raise ModelError(
            f"the checkpoint lacks {len(missing)} weights of {type(model).__name__}, first '{missing[0]}'",
            hint="it is incomplete, or made for another version of this architecture",
        )


def _linear(module: nn.Module, name: str, weights: HostedWeights) -> nn.Module | None:
    """What takes the place of a module that holds one weight matrix; None for every other module."""
    if name in weights.packed:
        linear = load_linear(weights.packed[name], weights.checkpoint.dtype)
        return PackedLinear(linear, _read_bias(name, weights), is_emulating=weights.is_emulating)
    if isinstance(module, nn.Linear) and f"{name}.weight" in weights.kept:
        weight = weights.kept[f"{name}.weight"].read()
    elif type(module) is nn.Module and name in weights.kept:  # a stack [E, K, N], as the model stores it
        weight = weights.kept[name].read().transpose(-1, -2).contiguous()
    else:
        return None
    return KeptLinear(weight, _read_bias(name, weights), weights.stored[name])


def _read_bias(name: str, weights: HostedWeights) -> Tensor | None:
    for full in (f"{name}.bias", f"{name}_bias"):
        if full in weights.kept:
            return weights.kept[full].read().float()
    return None


def _set_module(root: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    root.get_submodule(parent).register_module(leaf, module)


def _set_parameter(root: nn.Module, path: str, value: Tensor) -> None:
    parent, _, leaf = path.rpartition(".")
    root.get_submodule(parent).register_parameter(leaf, nn.Parameter(value, requires_grad=False))


def _set_buffer(root: nn.Module, path: str, value: Tensor) -> None:
    parent, _, leaf = path.rpartition(".")
    root.get_submodule(parent).register_buffer(leaf, value)
