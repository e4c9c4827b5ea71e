"""Puts a checkpoint's tensors into a skeleton, all of it or one submodule at a time."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.checkpoint.dialects.stored import StoredLinear
from blockscale.checkpoint.load import load_linear, plain_values
from blockscale.checkpoint.reader import Checkpoint
from blockscale.checkpoint.source import SourceTensor
from blockscale.errors import ModelError
from blockscale.host.experts import ExpertStack, host_experts, is_fused_experts
from blockscale.host.linear import KeptLinear, PackedLinear
from blockscale.host.skeleton import checkpoint_names

_USED_BARE = ("dt_proj",)  # of state-space layers


@dataclass(frozen=True)
class HostedWeights:
    """A checkpoint's contents under the model's own names.

    kept      16-bit tensors by parameter name
    packed    quantized linears by module name
    stored    module name in the model -> module name in the checkpoint

    activation_scale   how block scales of NVFP4 inputs are chosen where inputs are rounded
    """

    checkpoint: Checkpoint
    kept: Mapping[str, SourceTensor]
    packed: Mapping[str, StoredLinear]
    stored: Mapping[str, str]
    is_emulating: bool
    activation_scale: ActivationScale = ActivationScale.AMAX


def host_weights(
    model: Any, checkpoint: Checkpoint, *, is_emulating: bool, activation_scale: ActivationScale | None = None
) -> HostedWeights:
    """Maps names and gives fused experts a place for each expert's linears. `activation_scale`: by default the
    checkpoint's own."""
    linears = checkpoint.quantized.linears if checkpoint.quantized else {}
    # renamings are written for parameter names, so a packed linear asks for its weight's
    weight_names = {f"{module}.weight": module for module in linears}
    renamed = checkpoint_names(model, [*checkpoint.kept, *weight_names])
    kept = {renamed[name]: tensor for name, tensor in checkpoint.kept.items()}
    packed = {renamed[name].removesuffix(".weight"): linears[module] for name, module in weight_names.items()}
    stored = {new.removesuffix(".weight"): old.removesuffix(".weight") for old, new in renamed.items()}
    _unfuse_experts(model, {*kept, *(f"{module}.weight" for module in packed)})
    method = checkpoint.activation_scale if activation_scale is None else activation_scale
    return HostedWeights(checkpoint, kept, packed, stored, is_emulating, method)


def _unfuse_experts(model: nn.Module, names: set[str]) -> None:
    for path, module in list(model.named_modules()):
        if is_fused_experts(module):
            below = {name.removeprefix(path + ".") for name in names if name.startswith(path + ".")}
            set_module(model, path, host_experts(module, below))


def materialize(model: nn.Module, weights: HostedWeights, path: str = "", *, skip: str | None = None) -> nn.Module:
    """Fills the submodule at `path` in place, but not the one at `skip`, and returns it.

    Linears become PackedLinear or KeptLinear; every other parameter is read and cast to the skeleton's dtype.
    ModelError if the checkpoint lacks a parameter.
    """
    root = model.get_submodule(path)
    prefix = path + "." if path else ""

    def is_skipped(name: str) -> bool:
        return skip is not None and name.startswith(skip + ".")

    missing = []
    for name, module in list(root.named_modules()):
        full = prefix + name
        if is_skipped(full + ".") or not _is_linear(module, full):
            continue
        replacement = _linear(module, full, weights)
        if replacement is not None:
            set_module(root, name, replacement)
            if _has_bias(module) and replacement.bias is None:
                missing.append(f"{full}.bias")
        elif isinstance(module, ExpertStack):
            missing.append(full)
    for name, parameter in list(root.named_parameters()):
        full = prefix + name
        if not parameter.is_meta or is_skipped(full):
            continue
        value = _read_parameter(full, parameter, weights)
        if value is None:
            missing.append(full)
        else:
            _set_parameter(root, name, value)
    for name, buffer in list(root.named_buffers()):
        full = prefix + name
        if is_skipped(full):
            continue
        if full in weights.kept and _is_persistent(root, name):  # the others were computed
            value = weights.kept[full].read()
            _set_buffer(root, name, value.to(torch.promote_types(value.dtype, buffer.dtype)))
        elif buffer.is_meta:
            missing.append(full)
    _check_missing(model, missing)
    return root


def materialized_copy(model: nn.Module, weights: HostedWeights, path: str) -> nn.Module:
    """The submodule at `path` with weights, as a copy: the skeleton stays empty and the copy can be dropped."""
    if not path:
        return materialize(copy.deepcopy(model), weights)
    parent, _, leaf = path.rpartition(".")
    holder = model.get_submodule(parent)
    empty = getattr(holder, leaf) if not leaf.isdigit() else holder[int(leaf)]  # type: ignore[index]
    set_module(model, path, copy.deepcopy(empty))
    try:
        return materialize(model, weights, path)
    finally:
        set_module(model, path, empty)


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


def _is_linear(module: nn.Module, name: str) -> TypeGuard[nn.Linear | ExpertStack]:
    """Subclasses with a forward of their own, such as routers, do something else; and so do models that compute with a
    module's weight themselves."""
    is_used_bare = name.rpartition(".")[2] in _USED_BARE
    return isinstance(module, ExpertStack) or (type(module).forward is nn.Linear.forward and not is_used_bare)


def _linear(module: nn.Linear | ExpertStack, name: str, weights: HostedWeights) -> PackedLinear | KeptLinear | None:
    """What takes the module's place; None if the checkpoint has no weight for it."""
    if isinstance(module, ExpertStack):
        shape, kept_name = module.shape, name
    else:
        shape, kept_name = (module.out_features, module.in_features), f"{name}.weight"
    if name in weights.packed:
        _check_shape(name, weights.packed[name].shape, shape)
        linear = load_linear(weights.packed[name], weights.checkpoint.dtype)
        bias = _read_bias(module, name, shape, weights)
        method = weights.activation_scale
        return PackedLinear(linear, bias, is_emulating=weights.is_emulating, activation_scale=method)
    if kept_name not in weights.kept:
        return None
    weight = weights.kept[kept_name].read()
    if isinstance(module, ExpertStack) and module.is_transposed:
        weight = weight.transpose(-1, -2).contiguous()
    _check_shape(name, tuple(weight.shape), shape)
    return KeptLinear(weight, _read_bias(module, name, shape, weights), weights.stored[name])


def _has_bias(module: nn.Linear | ExpertStack) -> bool:
    return module.has_bias if isinstance(module, ExpertStack) else module.bias is not None


def _read_bias(
    module: nn.Linear | ExpertStack, name: str, shape: tuple[int, ...], weights: HostedWeights
) -> Tensor | None:
    full = f"{name}_bias" if isinstance(module, ExpertStack) else f"{name}.bias"
    if not _has_bias(module) or full not in weights.kept:
        return None
    bias = weights.kept[full].read().float()
    _check_shape(full, tuple(bias.shape), shape[:-1])
    return bias


def _read_parameter(name: str, parameter: nn.Parameter, weights: HostedWeights) -> Tensor | None:
    """A tensor that is no linear's weight, in the model's dtype; decoded if it is packed all the same."""
    module = name.removesuffix(".weight")
    if module in weights.packed:
        value = plain_values(load_linear(weights.packed[module], weights.checkpoint.dtype))
    elif name in weights.kept:
        value = weights.kept[name].read()
    else:
        return None
    _check_shape(name, tuple(value.shape), tuple(parameter.shape))
    return value.to(parameter.dtype)


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(found) != tuple(expected):
        raise ModelError(
            f"{name}: the checkpoint has {list(found)}, the model {list(expected)}",
            hint="config.json belongs to another model",
        )


def set_module(root: nn.Module, path: str, module: nn.Module) -> None:
    """`module` takes the place of the one at `path` below `root`."""
    parent, _, leaf = path.rpartition(".")
    root.get_submodule(parent).register_module(leaf, module)


def _set_parameter(root: nn.Module, path: str, value: Tensor) -> None:
    parent, _, leaf = path.rpartition(".")
    root.get_submodule(parent).register_parameter(leaf, nn.Parameter(value, requires_grad=False))


def _is_persistent(root: nn.Module, path: str) -> bool:
    parent, _, leaf = path.rpartition(".")
    return leaf not in root.get_submodule(parent)._non_persistent_buffers_set


def _set_buffer(root: nn.Module, path: str, value: Tensor) -> None:
    parent, _, leaf = path.rpartition(".")
    root.get_submodule(parent).register_buffer(leaf, value)
