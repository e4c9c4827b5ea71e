"""A transformers model without weights: built on the meta device from a config, its computed buffers made real."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockscale.errors import ModelError
from blockscale.host import attention

DATA_FREE = "recipes without calibration (nvfp4-w4a16, mxfp4, fp8) need no model class"


def load_config(path: Path) -> Any:
    """The model's transformers config, without any quantization. ModelError for an unknown architecture."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, KeyError, OSError, TypeError, AttributeError, ArithmeticError, ImportError) as e:
        raise ModelError(f"{path}: transformers cannot read the config: {_first_line(e)}", hint=DATA_FREE) from e
    for owner in (config, getattr(config, "text_config", None)):
        if owner is not None and hasattr(owner, "quantization_config"):
            delattr(owner, "quantization_config")
    return config


def build_skeleton(config: Any, dtype: torch.dtype, *, with_kv_transforms: bool = False) -> nn.Module:
    """The model with every parameter on the meta device. `with_kv_transforms`: see `host.attention`."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    # the first also for models that have both; the second run on text alone as well
    kinds = (AutoModelForCausalLM, AutoModelForImageTextToText)
    auto = next((kind for kind in kinds if type(config) in kind._model_mapping), AutoModelForCausalLM)
    try:
        with torch.device("meta"), _quiet():
            model = auto.from_config(config, dtype=dtype)
            if with_kv_transforms:
                base = model.config.get_text_config()._attn_implementation
                model.set_attn_implementation(attention.register(base))
    except (ValueError, ImportError, KeyError, TypeError, AttributeError, ArithmeticError) as e:
        raise ModelError(
            f"transformers has no language model for '{config.model_type}': {_first_line(e)}", hint=DATA_FREE
        ) from e
    model.eval().requires_grad_(False)
    _restore_buffers(model)
    return model


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers warns about what a skeleton is: no weights, no generation config."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _restore_buffers(model: Any) -> None:
    """Buffers that follow from the config (rotary frequencies, decays, embedding scales), as transformers itself
    computes them. Those that are learned stay on the meta device.

    ModelError for one that no checkpoint holds and that transformers leaves as it is: its memory would hold anything.
    """
    found = {f"{path}.{name}": (module, name) for path, module in model.named_modules() for name in module._buffers}
    found = {path: (module, name) for path, (module, name) in found.items() if module._buffers[name] is not None}
    for module, name in found.values():
        module._buffers[name] = _unset(module._buffers[name])

    def unset() -> list[str]:
        return [path for path, (module, name) in found.items() if _is_unset(module._buffers[name])]

    def lost() -> list[str]:
        return [path for path in unset() if not _is_stored(*found[path])]

    owners = {path: module for path, module in model.named_modules() if hasattr(module, "_init_weights")}

    def initialize(paths: Iterable[str]) -> None:
        """Each module by the innermost model that it belongs to, which knows its kind."""
        for path in paths:
            owner = path
            while owner not in owners:
                owner = owner.rpartition(".")[0]
            owners[owner]._init_weights(model.get_submodule(path))

    with torch.no_grad():
        initialize(dict.fromkeys(path.rpartition(".")[0] for path in found))
        if lost():  # some models fill their children's buffers
            initialize(path for path, _ in model.named_modules())
    if lost():
        raise ModelError(f"{type(model).__name__}: no way is known to compute '{lost()[0]}'", hint=DATA_FREE)
    for module, name in found.values():
        if _is_stored(module, name) and _is_constant(module._buffers[name]):
            module._buffers[name] = module._buffers[name].to("meta")


def _is_stored(module: nn.Module, name: str) -> bool:
    return name not in module._non_persistent_buffers_set


def _is_constant(buffer: torch.Tensor) -> bool:
    """What learning starts from, or what nobody set: no formula that a model computes looks like this."""
    return buffer.numel() < 2 or bool((buffer == buffer.flatten()[0]).all())


_MARK = -128.0  # no computed buffer consists of it


def _unset(buffer: torch.Tensor) -> torch.Tensor:
    """On the CPU, and marked (where the type has negative numbers)."""
    return torch.full_like(buffer, _MARK if buffer.dtype.is_signed else 0, device="cpu")


def _is_unset(buffer: torch.Tensor) -> bool:
    return buffer.numel() > 0 and bool((buffer == _MARK).all())


def decoder_layers(model: Any) -> tuple[str, nn.ModuleList]:
    """Module path and list of the decoder layers. ModelError if there is no such list."""
    decoder = model.get_decoder()
    count = decoder.config.num_hidden_layers
    for name, module in decoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            prefix = next(n for n, m in model.named_modules() if m is module)
            assert name
            return prefix, module
    raise ModelError(f"{type(model).__name__}: no list of {count} decoder layers", hint=DATA_FREE)


def checkpoint_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Stored tensor name -> name in the model. Only renamings are followed: experts stay one linear each."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    renamings = [t for t in get_model_conversion_mapping(model, add_legacy=False) if isinstance(t, WeightRenaming)]
    result = {}
    for name in names:
        renamed = name
        for renaming in renamings:
            renamed = renaming.rename_source_key(renamed)[0]
        result[name] = _rooted(model, renamed)
    return result


def _rooted(model: Any, name: str) -> str:
    """Without the model's own prefix where it is a part of a larger model, with it where the weights are of its body
    alone; as transformers does."""
    prefix = model.base_model_prefix
    first = name.partition(".")[0]
    if prefix == first and not hasattr(model, prefix):
        return name.removeprefix(prefix + ".")
    if not hasattr(model, first) and hasattr(getattr(model, prefix, None), first):
        return f"{prefix}.{name}"
    return name
