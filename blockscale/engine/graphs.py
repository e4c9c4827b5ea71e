"""Decode steps as CUDA graphs: a step's kernels are launched at once, where one by one takes longer than they run.

A graph is made for a number of sequences and a width of the page table, when first needed. A batch runs in the next
larger one; the rows that it lacks compute one token each on a page that belongs to nobody.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from blockscale.models.batch import Batch

_SMALL = (1, 2, 4)
_NARROWEST = 64  # pages
_ALIGNMENT = 64  # bytes


def graph_size(num: int) -> int:
    """Sequences of the graph that runs so many: steps of about an eighth, so that little is computed for nothing."""
    for size in _SMALL:
        if num <= size:
            return size
    step = 1 << max(3, (num - 1).bit_length() - 4)
    return -(-num // step) * step


def graph_width(num_pages: int) -> int:
    """Columns of the graph's page table: powers of four, for kernels plan by them and each costs a graph."""
    width = _NARROWEST
    while width < num_pages:
        width *= 4
    return width


def padded(batch: Batch, size: int, width: int, page: int, page_size: int) -> Batch:
    """A decode batch of `size` sequences, the added ones of one token each, which lies at the start of `page`."""
    extra = size - batch.token_ids.shape[0]
    table = pad(batch.page_table, (0, width - batch.page_table.shape[1]), value=page)
    table = pad(table, (0, 0, 0, extra), value=page)
    return replace(
        batch,
        token_ids=pad(batch.token_ids, (0, extra)),
        positions=pad(batch.positions, (0, extra)),
        cu_seqlens=torch.arange(size + 1, dtype=torch.int32, device=batch.cu_seqlens.device),
        lengths=pad(batch.lengths, (0, extra), value=1),
        page_table=table,
        slots=pad(batch.slots, (0, extra), value=page * page_size),
    )


class _Inputs:
    """What a graph reads: one piece of memory on the device, that one copy fills.

    batch  views of it
    """

    def __init__(self, like: Batch, device: torch.device) -> None:
        """like  a batch of the graph's sizes"""
        tensors = _tensors(like)
        places, end = {}, 0
        for name, tensor in tensors.items():
            places[name] = end
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._device = torch.empty(end, dtype=torch.uint8, device=device)
        # A step may be prepared while the copy for the one before still waits for its turn: two, used in turn
        self._hosts = [torch.empty(end, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in self._hosts]
        self._turn = 0

        def views(memory: Tensor) -> dict[str, Tensor]:
            return {
                n: memory[p : p + tensors[n].nbytes].view(tensors[n].dtype).view(tensors[n].shape)
                for n, p in places.items()
            }

        self._views = [views(host) for host in self._hosts]
        own: dict[str, Any] = views(self._device)
        self.batch = replace(like, **own)

    def fill(self, batch: Batch, tokens: Tensor | None) -> None:
        """From the host; `tokens` int64 [n] lie on the device, in place of the first of its own."""
        self._turn = 1 - self._turn
        self._sent[self._turn].synchronize()
        for name, view in self._views[self._turn].items():
            view.copy_(getattr(batch, name))
        self._device.copy_(self._hosts[self._turn], non_blocking=True)
        self._sent[self._turn].record()
        if tokens is not None:
            self.batch.token_ids[: len(tokens)].copy_(tokens)


def _tensors(batch: Batch) -> dict[str, Tensor]:
    parts = {field.name: getattr(batch, field.name) for field in fields(Batch)}
    return {name: part for name, part in parts.items() if isinstance(part, Tensor)}


@dataclass(frozen=True)
class _Captured:
    graph: Any  # torch.cuda.CUDAGraph
    inputs: _Inputs
    hidden: Tensor  # what it writes


class DecodeGraphs:
    """Graphs of one model and its caches.

    forward      what is captured
    page         of the caches, that holds nothing of anybody
    why_without  None while graphs are used, else the reason for which they are not
    """

    def __init__(self, forward: Callable[[Batch], Tensor], page: int, page_size: int, device: torch.device) -> None:
        self._forward = forward
        self._page = page
        self._page_size = page_size
        self._device = device
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._memory: Any = None  # all graphs share a pool: only one runs at a time
        self.why_without: str | None = None

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(sequences, pages) of the graphs there are."""
        return sorted(self._captured)

    def run(self, batch: Batch, tokens: Tensor | None = None) -> Tensor | None:
        """Hidden states [B, H] of a decode batch that lies on the host; they are overwritten by the next run.

        tokens  int64 [B] on the device, in place of the batch's own
        None from then on for a model that cannot be captured: its answers are the same without.
        """
        if self.why_without is not None:
            return None
        num = batch.token_ids.shape[0]
        size, width = graph_size(num), graph_width(batch.page_table.shape[1])
        whole = padded(batch, size, width, self._page, self._page_size)
        captured = self._captured.get((size, width))
        if captured is None:
            try:
                captured = self._capture(whole)
            except RuntimeError as e:  # also out of memory
                self.why_without = str(e).splitlines()[0] if str(e) else type(e).__name__
                self._captured.clear()
                torch.cuda.synchronize(self._device)
                return None
            self._captured[size, width] = captured
        captured.inputs.fill(whole, tokens)
        captured.graph.replay()
        return captured.hidden[:num]

    def _capture(self, batch: Batch) -> _Captured:
        inputs = _Inputs(batch, self._device)
        inputs.fill(batch, None)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are built and plans made outside the graph
                self._forward(inputs.batch)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            hidden = self._forward(inputs.batch)
        self._memory = self._memory or graph.pool()
        return _Captured(graph, inputs, hidden)
