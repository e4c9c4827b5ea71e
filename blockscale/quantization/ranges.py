"""Largest magnitudes of what linears and caches are given while a layer runs."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from blockscale.host.attention import KVTransform
from blockscale.host.linear import KeptLinear
from blockscale.host.weights import HostedWeights
from blockscale.quantization.windows import not_finite


@dataclass(frozen=True)
class Ranges:
    """Magnitudes seen so far: of inputs by module, and of (keys, values) by attention module."""

    input_amax: dict[str, float] = field(default_factory=dict)
    kv_amax: dict[str, tuple[float, float]] = field(default_factory=dict)

    def note_input(self, name: str, x: Tensor) -> None:
        """NonFiniteError for NaN or Inf. An input without tokens leaves no trace."""
        if x.numel():
            amax = x.abs().amax().item()
            if not math.isfinite(amax):
                raise not_finite(f"the input of {name}")
            self.input_amax[name] = max(self.input_amax.get(name, 0.0), amax)

    def note_kv(self, name: str, key: Tensor, value: Tensor) -> None:
        """NonFiniteError for NaN or Inf: attention can hide them from the layer's output."""
        pair = key.abs().amax().item(), value.abs().amax().item()
        if not all(map(math.isfinite, pair)):
            raise not_finite(f"the cache of {name}")
        self._add_kv(name, pair)

    def add(self, other: "Ranges") -> None:
        for name, amax in other.input_amax.items():
            self.input_amax[name] = max(self.input_amax.get(name, 0.0), amax)
        for name, pair in other.kv_amax.items():
            self._add_kv(name, pair)

    def _add_kv(self, name: str, pair: tuple[float, float]) -> None:
        key, value = self.kv_amax.get(name, (0.0, 0.0))
        self.kv_amax[name] = (max(key, pair[0]), max(value, pair[1]))


def watcher(ranges: Ranges, observe: Callable[[Ranges], None]) -> Callable[[], Callable[[], None]]:
    """To call before a batch, which `observe` sets the observers for; what it gives counts the batch, once it is known
    to be sound."""

    def watch() -> Callable[[], None]:
        seen = Ranges()
        observe(seen)
        return lambda: ranges.add(seen)

    return watch


def watcher_before(ranges: Ranges) -> Callable[[Sequence[KeptLinear]], Callable[[], None]]:
    """The same for linears before the decoder layers."""
    return lambda linears: watcher(ranges, partial(watch_inputs, linears))()


def watch_inputs(linears: Iterable[KeptLinear], ranges: Ranges) -> None:
    for linear in linears:
        linear.observer = ranges.note_input


def watch_caches(layer: nn.Module, weights: HostedWeights, path: str, ranges: Ranges) -> None:
    """Of each attention module below `layer`, which the model has at `path`."""
    for name, module in layer.named_modules():
        if hasattr(module, "k_proj") and hasattr(module, "v_proj"):
            stored = weights.stored[f"{path}.{name}.k_proj"].removesuffix(".k_proj")
            module.kv_transform = _noting(stored, ranges)


def _noting(name: str, ranges: Ranges) -> KVTransform:
    def note(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        ranges.note_kv(name, key, value)
        return key, value

    return note
