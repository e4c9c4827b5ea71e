"""An engine that writes a given answer: what the server asks of the real one, and nothing else."""

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blockscale.engine.detokenizer import Detokenizer
from blockscale.engine.pages import PageCounts
from blockscale.engine.request import Event, FinishReason, TokenLogprob, Usage
from blockscale.engine.sampling import Sampling
from blockscale.engine.vocabulary import Vocabulary
from blockscale.errors import BlockscaleError, ModelError

if TYPE_CHECKING:
    from blockscale.engine.engine import Stats

END = 0


@dataclass
class FakeEngine:
    """Writes the characters of `answers`, request after request, as tokens; an empty list echoes the prompt.

    running   requests at this moment; `aborted` those that were closed before their end
    gate      each token from the `gate_at`-th on waits for it
    share     probability that is said of each token
    fails_at  a token at which the engine dies
    """

    vocabulary: Vocabulary
    answers: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    asked: list[tuple[tuple[int, ...], Sampling]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    gate_at: int = 0
    fails_at: int | None = None
    refuses: BlockscaleError | None = None
    is_alive: bool = True
    busy_s: float = 0.0
    share: float = 0.5

    def __post_init__(self) -> None:
        self.gate.set()

    async def stats(self) -> "Stats":
        from blockscale.engine.engine import Stats

        pages = PageCounts(free=2, kept=1, held=1)
        return Stats(len(self.running), 0, pages, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, None)

    async def submit(
        self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str | None = None
    ) -> AsyncGenerator[Event]:
        if self.refuses:
            raise self.refuses
        name = request_id or str(len(self.asked))
        text = self.answers[len(self.asked) % len(self.answers)] if self.answers else None
        self.asked.append((tuple(prompt_ids), sampling))
        tokens = list(prompt_ids) if text is None else [ord(c) for c in text]
        tokens.append(END)
        self.running.add(name)
        detokenizer = Detokenizer(self.vocabulary, sampling)
        is_done = False
        try:
            for i, token in enumerate(tokens):
                if i >= self.gate_at:
                    await self.gate.wait()
                await asyncio.sleep(0)
                if i == self.fails_at:
                    self.is_alive, is_done = False, True
                    yield Event(name, finish_reason=FinishReason.ERROR, error=ModelError("the engine is gone"))
                    return
                piece = "" if token == END else detokenizer.push(token)
                reason = None
                if token == END or detokenizer.stopped_by:
                    reason = FinishReason.STOP
                elif i + 1 == sampling.max_tokens:
                    reason = FinishReason.LENGTH
                if reason:
                    piece += detokenizer.finish()
                is_done = reason is not None
                yield Event(
                    name,
                    (token,),
                    piece,
                    logprobs=(likelihood(token, self.share),) if sampling.logprobs is not None else (),
                    prompt_logprobs=self._of_prompt(prompt_ids, sampling) if i == 0 else (),
                    finish_reason=reason,
                    usage=Usage(len(prompt_ids), i + 1, 1) if reason else None,
                )
                if reason:
                    return
        finally:
            self.running.discard(name)
            if not is_done:
                self.aborted.append(name)

    def _of_prompt(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[TokenLogprob, ...]:
        return (
            () if sampling.prompt_logprobs is None else tuple(likelihood(token, self.share) for token in prompt_ids[1:])
        )


def likelihood(token: int, share: float) -> TokenLogprob:
    """`share` for the token itself, a quarter for the letter `z`."""
    return TokenLogprob(token, math.log(share), ((token, math.log(share)), (ord("z"), math.log(0.25))))
