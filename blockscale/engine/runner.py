"""From a step's work to hidden states: the batch, the caches and the forward pass."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockscale.engine.executor import Executor
from blockscale.engine.graphs import DecodeGraphs
from blockscale.engine.model import Model
from blockscale.engine.parallel import make_executor
from blockscale.engine.scheduler import Work
from blockscale.models.batch import Batch


def make_batch(works: Sequence[Work], page_size: int, *, has_tokens: bool = True) -> Batch:
    """The batch of a step, on the host: sequences in the order of `works`, their new tokens one after the other.

    has_tokens  else they are not known yet, and zeros stand for them
    """
    num_tokens = np.array([work.num_tokens for work in works], dtype=np.int64)  # [B]
    begins = np.array([work.begin for work in works], dtype=np.int64)
    ends = np.cumsum(num_tokens)
    of = np.repeat(np.arange(len(works)), num_tokens)  # [T], the sequence of each token
    positions = np.arange(ends[-1]) - (ends - num_tokens - begins)[of]  # [T]
    lengths = begins + num_tokens
    width = int(-(-lengths.max() // page_size))
    table = np.zeros((len(works), width), dtype=np.int32)
    for i, work in enumerate(works):
        held = work.request.page_row()[:width]
        table[i, : len(held)] = held
    slots = table[of, positions // page_size].astype(np.int64) * page_size + positions % page_size
    tokens = [token for work in works for token in _tokens(work)] if has_tokens else [0] * int(ends[-1])
    return Batch(
        token_ids=torch.from_numpy(np.array(tokens, dtype=np.int64)),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
        lengths=torch.from_numpy(lengths.astype(np.int32)),
        page_table=torch.from_numpy(table),
        slots=torch.from_numpy(slots),
        max_query=int(num_tokens.max()),
        is_decode=bool(num_tokens.max() == 1),
    )


def last_rows(works: Sequence[Work]) -> list[int]:
    """Rows of the hidden states after which a token is sampled: of each such work its last token, then its draft."""
    rows: list[int] = []
    end = 0
    for work in works:
        end += work.num_tokens
        if work.is_sampled:
            rows += range(end - len(work.draft) - 1, end)
    return rows


class Runner:
    """From works to hidden states.

    num_pages  that requests can have
    """

    def __init__(self, model: Model, num_pages: int, page_size: int, *, use_graphs: bool = True) -> None:
        self.model = model
        self.page_size = page_size
        self._executor = make_executor(model, num_pages, page_size, use_graphs=use_graphs)

    @property
    def caches(self) -> Sequence[Any]:
        """One page more than requests can have; of several devices, rank 0's."""
        return self._executor.caches

    @property
    def graphs(self) -> DecodeGraphs | None:
        return self._executor.graphs

    @property
    def can_run_ahead(self) -> bool:
        """Whether `run` takes tokens that lie on the device."""
        return isinstance(self._executor, Executor)

    def run(self, works: Sequence[Work], tokens: Tensor | None = None) -> Tensor:
        """Hidden states [T, H] of the works' tokens, until the next run.

        tokens  int64 [T] on the device, where the host does not know them yet
        """
        if tokens is None:
            return self._executor.run(make_batch(works, self.page_size))
        assert isinstance(self._executor, Executor)
        return self._executor.run(make_batch(works, self.page_size, has_tokens=False), tokens)

    def check(self) -> None:
        """RankError where what was computed may be wrong, for one of several devices is gone."""
        self._executor.check()


def _tokens(work: Work) -> list[int]:
    return [*work.request.tokens[work.begin : work.end], *work.draft]
