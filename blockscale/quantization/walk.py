"""The walk of the calibration windows through the decoder, one layer in memory at a time.

    windows --embedding--> generation 0 --layer 0--> generation 1 --> ... --layer n-1--> generation n

A layer's job follows from its inputs alone: its weights, a generation of hidden states on disk, and the arguments that
the model would call it with. Those are recorded anew by every run, for they depend on the tokens only.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockscale.checkpoint.header import TensorInfo
from blockscale.checkpoint.tensors import DTYPE_NAMES
from blockscale.host.linear import KeptLinear
from blockscale.host.skeleton import decoder_layers
from blockscale.host.weights import HostedWeights, materialized_copy
from blockscale.quantization.calls import Call, Recorder, SharedMapping
from blockscale.quantization.hidden_states import HiddenStates, batch_dim, read_back, stored_tensors, write_tensors
from blockscale.quantization.windows import Windows, not_finite, run_sound

Keep = Callable[[], None]  # counts what a batch has shown, once it is known to be sound
Watch = Callable[[], Keep]  # sets a layer's observers for one batch

_ARGUMENTS = "arguments"


@dataclass(frozen=True)
class Walk:
    """The decoder's layers, and how each is called on each batch of `windows`.

    prefix     module path of `layers`, which have no weights
    arguments  by layer and batch. Tensors that differ between batches lie on disk, in `folder`
    """

    model: Any
    weights: HostedWeights
    device: str
    folder: Path
    prefix: str
    layers: nn.ModuleList
    windows: Windows
    arguments: tuple[tuple[Call, ...], ...]

    def load(self, index: int) -> nn.Module:
        """A layer with its weights, as a copy that can be changed and dropped."""
        return materialized_copy(self.model, self.weights, f"{self.prefix}.{index}").to(self.device)

    def call(self, index: int, batch: int, states: HiddenStates) -> Call:
        """Arguments of layer `index` beside the hidden states, on the walk's device. `states`: the stream that runs."""
        return _fetched(self.arguments[index][batch], states, self.windows.batches[batch], self.device)


def record_calls(
    model: Any,
    weights: HostedWeights,
    windows: Windows,
    folder: Path,
    *,
    device: str = "cpu",
    states: HiddenStates | None = None,
    watch: Callable[[Sequence[KeptLinear]], Keep] | None = None,
) -> Walk:
    """Runs what comes before the layers. The walk's windows lack those whose embedding holds NaN or Inf.

    folder   for arguments that do not fit in memory
    states   where the embedded windows go, as generation 0
    watch    of the linears before the layers, if there are any
    """
    prefix, layers = decoder_layers(model)
    recorder = Recorder(model, weights, device)
    discard_arguments(folder)  # of an earlier run
    arguments = _Arguments(folder / _ARGUMENTS)
    num_batches = 0
    left = windows
    for numbers in windows.batches:

        def run(places: Sequence[int], numbers: Sequence[int] = numbers) -> tuple[Tensor, list[Call], Keep | None]:
            keep = watch(recorder.linears) if watch is not None else None
            return *recorder.record(windows.tokens([numbers[i] for i in places])), keep

        result, faults = run_sound(numbers, run)
        left = left.without(faults) if faults else left
        if result is not None:
            hidden, calls, keep = result
            arguments.add(calls)
            if keep is not None:
                keep()
            if states is not None:
                states.write(0, num_batches, hidden)
            num_batches += 1
    by_layer = tuple(zip(*arguments.batches, strict=True))
    return Walk(model, weights, device, folder, prefix, layers, left, by_layer)


def discard_arguments(folder: Path) -> None:
    """Removes what `record_calls` left there; its walk is then of no use."""
    shutil.rmtree(folder / _ARGUMENTS, ignore_errors=True)


def advance(walk: Walk, index: int, layer: nn.Module, states: HiddenStates, watch: Watch | None = None) -> Walk:
    """Runs a layer over generation `index` of the hidden states and writes generation `index` + 1.

    watch    called before every batch, and what it gives after the batch, unless that gave NaN or Inf

    Windows that give NaN or Inf are left out from here on: they are not in the next generation, nor in the walk that
    comes back. ModelError when they are more than half.
    """
    recorders: list[Recorder] = []

    def recorded(numbers: Sequence[int]) -> Call:
        """Of a part of a batch: what the model would do with these windows alone."""
        if not recorders:
            recorders.append(Recorder(walk.model, walk.weights, walk.device))
        call = recorders[0].record(walk.windows.tokens(numbers))[1][index]
        return _fetched(call, states, numbers, walk.device)

    left = walk.windows
    num_batches = 0
    for batch, numbers in enumerate(walk.windows.batches):
        hidden = states.read(index, batch)

        def run(
            places: Sequence[int], batch: int = batch, numbers: Sequence[int] = numbers, hidden: Tensor = hidden
        ) -> tuple[Tensor, Keep | None]:
            if len(places) == len(numbers):
                call = walk.call(index, batch, states)
            else:
                call = recorded([numbers[i] for i in places])
                hidden = hidden.index_select(batch_dim(hidden), torch.tensor(places))
            keep = watch() if watch is not None else None
            return run_layer(layer, hidden.to(walk.device), call, f"decoder layer {index}"), keep

        result, faults = run_sound(numbers, run)
        left = left.without(faults) if faults else left
        if result is not None:
            output, keep = result
            if keep is not None:
                keep()
            states.write(index + 1, num_batches, output)
            num_batches += 1
    if left is walk.windows:
        return walk
    again = record_calls(walk.model, walk.weights, left, walk.folder, device=walk.device)
    return replace(walk, windows=left, arguments=again.arguments)


def run_layer(layer: nn.Module, hidden: Tensor, call: Call, name: str = "a decoder layer") -> Tensor:
    """[B, T, H] -> [B, T, H], on the layer's device. NonFiniteError, which names the layer, for NaN or Inf."""
    args, kwargs = call
    output = layer(hidden, *args, **kwargs)
    result: Tensor = output[0] if isinstance(output, tuple) else output
    if not torch.isfinite(result).all():
        raise not_finite(f"the output of {name}")
    return result


def run_until(layer: nn.Module, hidden: Tensor, call: Call, module_name: str) -> Tensor | None:
    """What the module of that name inside a decoder layer is given on its first call, where the layer stops.

    None if it is not called at all, as an expert that no token reaches.
    """
    args, kwargs = call

    def stop(_: nn.Module, module_args: tuple[Any, ...], module_kwargs: dict[str, Any]) -> None:
        raise _Reached(module_args[0] if module_args else next(iter(module_kwargs.values())))

    handle = layer.get_submodule(module_name).register_forward_pre_hook(stop, with_kwargs=True)
    try:
        layer(hidden, *args, **kwargs)
    except _Reached as reached:
        return reached.input
    finally:
        handle.remove()
    return None


class _Reached(Exception):
    """Leaves a layer at the module that was looked for."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.input = x


class _Arguments:
    """Calls of all batches, in the order in which they come. They mostly share masks and rotary embeddings: of equal
    tensors the first batch's is held, and of the others each goes to a file, one a batch."""

    def __init__(self, folder: Path) -> None:
        self.batches: list[list[Call]] = []
        self._folder = folder

    def add(self, calls: list[Call]) -> None:
        """`calls`: of every layer, on one batch."""
        first = self.batches[0] if self.batches else calls
        stored: dict[int, tuple[Tensor, int]] = {}  # by id, together with the tensor, lest its id is given away
        compared: dict[tuple[int, int], bool] = {}

        def shared(new: Any, old: Any) -> Any:
            if isinstance(new, tuple):
                others = old if isinstance(old, tuple) and len(old) == len(new) else (None,) * len(new)
                return tuple(shared(n, o) for n, o in zip(new, others, strict=True))
            if not isinstance(new, Tensor) or new.dtype not in DTYPE_NAMES:
                return new
            pair = id(new), id(old)
            if pair not in compared:
                compared[pair] = new is old or _is_equal(new, old)
            return old if compared[pair] else _Stored(stored.setdefault(id(new), (new, len(stored)))[1])

        kept = [
            (
                tuple(shared(x, first_args[i] if i < len(first_args) else None) for i, x in enumerate(args)),
                {name: shared(x, first_kwargs.get(name)) for name, x in kwargs.items()},
            )
            for (args, kwargs), (first_args, first_kwargs) in zip(calls, first, strict=True)
        ]
        if stored:
            path = self._folder / str(len(self.batches))
            write_tensors(path, [tensor for tensor, _ in stored.values()])
            infos = stored_tensors(path)
            kept = [_mapped(call, lambda x: infos[x.number] if isinstance(x, _Stored) else x) for call in kept]
        self.batches.append(kept)


@dataclass(frozen=True)
class _Stored:
    """Stands for a tensor on its way to the batch's file."""

    number: int


def _is_equal(new: Tensor, old: Any) -> bool:
    return isinstance(old, Tensor) and new.shape == old.shape and new.dtype == old.dtype and torch.equal(new, old)


def _fetched(call: Call, states: HiddenStates, numbers: Sequence[int], device: str) -> Call:
    """As a layer can be called: with tensors for places on disk, and a mapping where layers share one."""

    def fetch(value: Any) -> Any:
        if isinstance(value, TensorInfo):
            return read_back(value).to(device)
        return states.shared(numbers, device) if isinstance(value, SharedMapping) else value

    return _mapped(call, fetch)


def _mapped(call: Call, change: Callable[[Any], Any]) -> Call:
    def apply(value: Any) -> Any:
        # TensorInfo is a tuple too
        is_plain = isinstance(value, tuple) and not isinstance(value, TensorInfo)
        return tuple(apply(v) for v in value) if is_plain else change(value)

    args, kwargs = call
    return tuple(apply(x) for x in args), {name: apply(x) for name, x in kwargs.items()}
