"""What the engine asks of a model."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from blockscale.models.batch import Batch


class Model(Protocol):
    """A decoder with its cache's format chosen.

    identity    names weights and format of the cache: keys and values of one are of no use to another
    vocab_size  of the logits
    context     tokens of a sequence at most
    """

    @property
    def identity(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def context(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page of so many tokens, of all layers together."""

    def allocate(self, num_pages: int, page_size: int) -> Sequence[Any]:
        """A cache a layer."""

    def forward(self, batch: Batch, caches: Sequence[Any]) -> Tensor:
        """[T, H]: hidden states after the final norm. Writes the new tokens' keys and values."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> float32 [R, V]."""
