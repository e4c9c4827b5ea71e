"""How a model calls its decoder layers: recorded by running it with layers that only listen."""

import copy
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockscale.errors import ModelError
from blockscale.host.linear import KeptLinear
from blockscale.host.skeleton import DATA_FREE, decoder_layers
from blockscale.host.weights import HostedWeights, materialized_copy
from blockscale.quantization.windows import not_finite

Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments beside the hidden states


@dataclass(frozen=True)
class SharedMapping:
    """Stands for an empty mapping among the arguments: what layers leave in it, later ones look for."""


class Recorder:
    """Runs what comes before the decoder layers; holds its weights (the embedding, mostly) as long as it lives."""

    def __init__(self, model: Any, weights: HostedWeights, device: str) -> None:
        self._device = device
        prefix, layers = decoder_layers(model)
        answer = _Answer(materialized_copy(model, weights, f"{prefix}.0").to(device))
        self._listeners = [_Listener(layer, answer) for layer in layers]
        path, _, leaf = prefix.rpartition(".")
        with _set_aside(model.get_submodule(path), leaf):
            self._decoder = materialized_copy(model, weights, path)
        setattr(self._decoder, leaf, nn.ModuleList(self._listeners))
        self._decoder.to(device)
        # those after the layers are never watched: the first layer's call ends it
        self.linears = [module for module in self._decoder.modules() if isinstance(module, KeptLinear)]

    def record(self, ids: Tensor) -> tuple[Tensor, list[Call]]:
        """Token ids [B, T] -> what the first layer is given, and each layer's call. NonFiniteError for NaN or Inf."""
        for listener in self._listeners:
            listener.call = None
        embedded: list[Tensor] = []

        def begin_layers(hidden: Tensor) -> None:
            for linear in self.linears:
                linear.observer = None
            embedded.append(hidden)

        self._listeners[0].begin = begin_layers
        self._decoder(input_ids=ids.to(self._device), use_cache=False)
        calls = [listener.call for listener in self._listeners if listener.call is not None]
        if len(calls) < len(self._listeners):
            raise ModelError(
                f"the model runs {len(calls)} of its {len(self._listeners)} decoder layers on plain text",
                hint=DATA_FREE,
            )
        if not torch.isfinite(embedded[0]).all():
            raise not_finite("the embedding, the input of decoder layer 0,")
        return embedded[0], calls


@contextmanager
def _set_aside(owner: Any, name: str) -> Iterator[None]:
    """The list of layers is empty meanwhile."""
    layers = getattr(owner, name)
    setattr(owner, name, nn.ModuleList())
    try:
        yield
    finally:
        setattr(owner, name, layers)


class _Listener(nn.Module):
    """Stands for a decoder layer, writes down what it is called with and passes the hidden states on."""

    def __init__(self, layer: nn.Module, answer: "_Answer") -> None:
        super().__init__()
        self.call: Call | None = None
        self.begin: Callable[[Tensor], None] | None = None
        self.answer = answer
        # models look at attributes of their layers, such as the kind of attention
        for name, value in vars(layer).items():
            if not name.startswith("_") and not hasattr(self, name):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.begin is not None:
            self.begin(hidden_states)
        self.call = tuple(map(_recorded, args)), {name: _recorded(value) for name, value in kwargs.items()}
        return self.answer(hidden_states, args, kwargs)


def _recorded(value: Any) -> Any:
    return SharedMapping() if isinstance(value, MutableMapping) and not value else value


class _Answer:
    """Hidden states in the form in which the model's layers return them: alone, or first of a tuple. Looked up once by
    running a layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer: nn.Module | None = layer
        self.others: tuple[None, ...] | None = None

    def __call__(self, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.layer is not None:
            # what it leaves in a mapping must not be there for the other listeners
            own = {k: copy.copy(v) if isinstance(v, MutableMapping) else v for k, v in kwargs.items()}
            output = self.layer(hidden, *args, **own)
            self.others = (None,) * (len(output) - 1) if isinstance(output, tuple) else None
            self.layer = None
        return hidden if self.others is None else (hidden, *self.others)
