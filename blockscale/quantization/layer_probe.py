"""One decoder layer, run on a few random tokens to see how its modules hang together.

Modules are known by their names inside the layer. A probe multiplies what some are given and what others give by
factors of the caller's, and notes what the watched ones were given: nothing in the layer is changed.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from blockscale.errors import ModelError

CallLayer = Callable[[Tensor], Tensor]  # hidden states [B, T, H] -> the layer's output, likewise
SEED = 7


def random_hidden(like: Tensor) -> Tensor:
    """Standard normal hidden states in the shape, dtype and place of `like`, always the same for a shape."""
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(SEED))
    return drawn.to(device=like.device, dtype=like.dtype)


def run_probe(
    layer: nn.Module,
    call_layer: CallLayer,
    hidden: Tensor,
    *,
    watch: Iterable[str],
    scale_inputs: Mapping[str, Tensor] | None = None,
    scale_outputs: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """The layer's output, and name -> every floating-point tensor that a watched module was given, call by call (one
    a call for a linear), before it is scaled. Modules stand in the order of their first calls; the tensors are copies.

    scale_inputs    name -> [K], multiplied into the module's first argument
    scale_outputs   name -> [N], multiplied into its output
    """
    seen: dict[str, list[Tensor]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
            seen.setdefault(name, []).extend(x.detach().clone() for x in given)

        return hook

    def multiply_input(factor: Tensor) -> Callable[..., tuple[Any, ...]]:
        return lambda _, args: (args[0] * factor.to(args[0].dtype), *args[1:])

    def multiply_output(factor: Tensor) -> Callable[..., Tensor]:
        return lambda _, args, output: output * factor.to(output.dtype)

    handles = []
    try:
        for name in watch:
            handles.append(layer.get_submodule(name).register_forward_pre_hook(note(name), with_kwargs=True))
        for name, factor in (scale_inputs or {}).items():
            handles.append(layer.get_submodule(name).register_forward_pre_hook(multiply_input(factor)))
        for name, factor in (scale_outputs or {}).items():
            handles.append(layer.get_submodule(name).register_forward_hook(multiply_output(factor)))
        with torch.inference_mode():
            output = call_layer(hidden)
    finally:
        for handle in handles:
            handle.remove()
    return output, seen


def check_output(output: Tensor) -> Tensor:
    """The output. ModelError for one from which nothing can be seen."""
    if not torch.isfinite(output).all():
        raise ModelError(
            "a decoder layer gives NaN or Inf on random hidden states",
            hint="the model is damaged or needs more than its stored precision; recipes without smoothing do not ask",
        )
    return output


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same values in the same order, whatever their shapes."""
    return a.numel() == b.numel() and torch.equal(a.reshape(-1).float(), b.reshape(-1).float())
