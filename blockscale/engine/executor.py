"""One process's forward pass: its caches, and the graphs that decode over them."""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from blockscale.engine.graphs import DecodeGraphs
from blockscale.engine.model import Model
from blockscale.models.batch import Batch


class Executor:
    """Owns the caches.

    num_pages  that requests can have; one more is allocated, on which rows that pad a graph write
    """

    def __init__(self, model: Model, num_pages: int, page_size: int, *, use_graphs: bool) -> None:
        self.model = model
        self.caches = model.allocate(num_pages + 1, page_size)
        is_graphed = use_graphs and model.device.type == "cuda"
        self.graphs = DecodeGraphs(self._forward, num_pages, page_size, model.device) if is_graphed else None

    @torch.inference_mode()
    def run(self, batch: Batch, tokens: Tensor | None = None) -> Tensor:
        """Hidden states [T, H] of a batch that lies on the host, until the next run.

        tokens  int64 [T] on the device, in place of the batch's own
        """
        if self.graphs is not None and batch.is_decode:
            hidden = self.graphs.run(batch, tokens)
            if hidden is not None:
                return hidden
        placed = _placed(batch, self.model.device)
        return self._forward(placed if tokens is None else replace(placed, token_ids=tokens))

    def check(self) -> None:
        """Of several devices, whether all are still there. One has nothing to say."""

    def _forward(self, batch: Batch) -> Tensor:
        return self.model.forward(batch, self.caches)


def _placed(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    parts: dict[str, Any] = {field.name: getattr(batch, field.name) for field in fields(Batch)}
    tensors = {name: part for name, part in parts.items() if isinstance(part, Tensor)}
    sent: dict[str, Any] = {name: t.pin_memory().to(device, non_blocking=True) for name, t in tensors.items()}
    return replace(batch, **sent)
