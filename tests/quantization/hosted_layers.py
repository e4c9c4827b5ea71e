"""Decoder layers of tiny models as calibration holds them, and how each is called."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockscale.checkpoint.reader import open_checkpoint
from blockscale.checkpoint.source import open_source
from blockscale.host.skeleton import build_skeleton, decoder_layers, load_config
from blockscale.host.weights import HostedWeights, host_weights, materialize
from blockscale.quantization.plan import PlannedLinear, make_plan
from blockscale.quantization.recipe import RECIPES, Recipe


@dataclass(frozen=True)
class HostedLayer:
    """`layer` is a part of `model`: what is done to it shows in the model's logits."""

    model: Any
    layer: nn.Module
    path: str
    weights: HostedWeights
    linears: Mapping[str, PlannedLinear]
    hidden: Tensor
    call: Callable[[Tensor], Tensor]

    def logits(self) -> Tensor:
        return run(self.model, token_ids())


def token_ids(batch: int = 2, length: int = 12) -> Tensor:
    return torch.randint(126, (batch, length), generator=torch.Generator().manual_seed(2))


def run(model: Any, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits.float()


def hosted_layers(
    folder: Path, ids: Tensor | None = None, *, dtype: torch.dtype = torch.float32, recipe: Recipe = RECIPES["nvfp4"]
) -> list[HostedLayer]:
    """The layers of a 16-bit model, computing in `dtype`, and what each was called with on these tokens."""
    checkpoint = open_checkpoint(folder)
    model: Any = build_skeleton(load_config(folder), dtype)
    weights = host_weights(model, checkpoint, is_emulating=False)
    materialize(model, weights)
    model.tie_weights()
    prefix, layers = decoder_layers(model)
    linears = make_plan(open_source(folder), recipe).linears
    calls: dict[int, Any] = {}

    def note(index: int) -> Callable:
        def hook(_: nn.Module, args: tuple, kwargs: dict) -> None:
            calls[index] = (args, kwargs)

        return hook

    handles = [layer.register_forward_pre_hook(note(i), with_kwargs=True) for i, layer in enumerate(layers)]
    run(model, token_ids() if ids is None else ids)
    for handle in handles:
        handle.remove()

    def hosted(index: int) -> HostedLayer:
        (hidden, *args), kwargs = calls[index]
        layer = layers[index]

        def call(x: Tensor) -> Tensor:
            with torch.inference_mode():
                output = layer(x, *args, **kwargs)
            return output[0] if isinstance(output, tuple) else output

        return HostedLayer(model, layer, f"{prefix}.{index}", weights, linears, hidden, call)

    return [hosted(i) for i in range(len(layers))]
