"""A model whose next token is a hash of all tokens before it, read back from the pages: any mix-up of pages shows."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from blockscale.models.batch import Batch

VOCAB_SIZE = 97
_FACTOR, _MODULUS = 6364136, 2**31 - 1


class FakeModel:
    """The cache holds token ids + 1; 0 is a slot that nobody wrote. A hidden state is the hash of its sequence so far.

    fails     called with each batch before it is computed; may raise
    """

    identity = "fake"
    vocab_size = VOCAB_SIZE
    device = torch.device("cpu")

    def __init__(self, context: int = 512, fails: Callable[[Batch], None] | None = None) -> None:
        self.context = context
        self.fails = fails
        self.batches: list[Batch] = []

    def page_bytes(self, page_size: int) -> int:
        return 8 * page_size

    def allocate(self, num_pages: int, page_size: int) -> Sequence[Tensor]:
        return [torch.zeros(num_pages, page_size, dtype=torch.int64)]

    def forward(self, batch: Batch, caches: Sequence[Tensor]) -> Tensor:
        self.batches.append(batch)
        if self.fails is not None:
            self.fails(batch)
        (cache,) = caches
        page_size = cache.shape[1]
        assert batch.slots.unique().numel() == batch.slots.numel(), "two tokens in one place"
        cache.view(-1)[batch.slots] = batch.token_ids + 1
        bounds = batch.cu_seqlens.tolist()
        hidden = []
        for i, length in enumerate(batch.lengths.tolist()):
            num = bounds[i + 1] - bounds[i]
            assert batch.positions[bounds[i] : bounds[i + 1]].tolist() == list(range(length - num, length))
            pages = batch.page_table[i, : -(-length // page_size)].long()
            held = cache[pages].flatten()[:length].tolist()
            assert 0 not in held, "a token was not computed"
            hashes = running_hashes([t - 1 for t in held])
            hidden += hashes[length - num :]
        assert batch.max_query == max(b - a for a, b in pairwise(bounds))
        assert batch.is_decode == (batch.max_query == 1)
        return torch.tensor(hidden, dtype=torch.int64)[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.stack([logits_of(int(state)) for state in hidden[:, 0]])


def running_hashes(tokens: Sequence[int]) -> list[int]:
    state, found = 1, []
    for token in tokens:
        state = (state * _FACTOR + token + 1) % _MODULUS
        found.append(state)
    return found


def logits_of(state: int) -> Tensor:
    """float32 [V], all different."""
    ids = torch.arange(VOCAB_SIZE, dtype=torch.int64)
    return ((state * (2 * ids + 1) + ids * 40503) % 65521).float() / 8192 + ids.float() * 1e-5


def next_token(tokens: Sequence[int]) -> int:
    return int(logits_of(running_hashes(tokens)[-1]).argmax())


def greedy(prompt: Sequence[int], num: int) -> list[int]:
    """The output, one token after the other."""
    tokens = list(prompt)
    for _ in range(num):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]
