"""A request on its way through the engine, and the events that tell what became of it."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from torch import Tensor

from blockscale.engine.detokenizer import Detokenizer
from blockscale.engine.ngram import NgramIndex
from blockscale.engine.sampling import Sampling
from blockscale.engine.structure import Structure
from blockscale.errors import BlockscaleError
from blockscale.models.pooling import Pooling


class FinishReason(Enum):
    """Why an output ended."""

    STOP = "stop"  # an end token, a stop string or a complete structure
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # whoever asked does not want it any more
    ERROR = "error"  # the event's `error` says what failed


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithms of probabilities, of the model's own distribution.

    top  (token id, its log-probability), likeliest first
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """Tokens of a request. `cached_tokens` of the prompt were not computed: their keys and values lay in the cache."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Event:
    """What a step brought for one request. The last one has a `finish_reason`, and is the only one that has it.

    token_ids        new tokens; an end token that ended the output is among them
    text             text that became final; joined over the events, it is the output's. Stop strings are no part of it,
                     and it may lag behind the tokens
    logprobs         one a token, where asked for
    prompt_logprobs  of the prompt's tokens but the first, in the first event that has tokens, where asked for
    stopped_by       the stop string or stop token of the request that ended it; None for the model's end tokens
    error            with FinishReason.ERROR
    usage            with the last event
    vector           of the prompt, where pooling was asked for; in the only event
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None
    error: BlockscaleError | None = None
    usage: Usage | None = None
    vector: tuple[float, ...] | None = None


@dataclass(eq=False)
class Request:
    """The engine's own record; nobody else changes it.

    arrival       its place in the order of arrival
    tokens        prompt and output so far
    seed          of what is drawn
    last          tokens at which the output ends, by max_tokens or by the context
    pages         of the cache that it holds, in order
    num_computed  of the first tokens, whose keys and values lie in `pages`
    hashes        of its full pages, as far as they were needed
    num_published full pages that the prefix cache knows
    num_cached    of the prompt's tokens that were found in the cache, when it first ran
    pooled        fp64 [H], not yet divided, of the first `num_pooled` tokens; None before the first of them
    """

    id: str
    arrival: int
    tokens: list[int]
    num_prompt: int
    sampling: Sampling
    seed: int
    last: int
    end_ids: frozenset[int]
    detokenizer: Detokenizer | None = None
    structure: Structure | None = None
    ngrams: NgramIndex | None = None
    state: State = State.WAITING
    num_computed: int = 0
    num_published: int = 0
    num_cached: int | None = None
    hashes: list[bytes] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    pooled: Tensor | None = None
    num_pooled: int = 0
    _row: np.ndarray = field(default_factory=lambda: np.zeros(8, dtype=np.int32))

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_decoding(self) -> bool:
        """All tokens but the last are computed."""
        return self.num_computed == len(self.tokens) - 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Still: they are complete once the prompt was computed."""
        return self.sampling.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt - 1

    @property
    def needs_every_row(self) -> bool:
        """Hidden states of tokens are needed that the prefix cache would spare."""
        is_pooled = self.sampling.pooling in (Pooling.MEAN, Pooling.FIRST)
        return is_pooled or self.wants_prompt_logprobs

    def add_pages(self, pages: list[int]) -> None:
        begin = len(self.pages)
        self.pages += pages
        if len(self.pages) > len(self._row):
            grown = np.zeros(2 * len(self.pages), dtype=np.int32)
            grown[:begin] = self._row[:begin]
            self._row = grown
        self._row[begin : len(self.pages)] = pages

    def take_pages(self) -> list[int]:
        """Gives its pages away, and with them what was computed."""
        pages, self.pages = self.pages, []
        self.num_computed = self.num_published = 0
        return pages

    def page_row(self) -> np.ndarray:
        """int32: `pages`, as an array; what lies past their number means nothing but is a page."""
        return self._row

    def usage(self) -> Usage:
        return Usage(self.num_prompt, self.num_output, self.num_cached or 0)
