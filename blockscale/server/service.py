"""What every endpoint works with, made once when the server starts."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from blockscale.engine.request import Event
from blockscale.engine.sampling import Sampling
from blockscale.engine.vocabulary import Vocabulary
from blockscale.errors import BlockscaleError
from blockscale.models.pooling import NOT_TRAINED, Embedding
from blockscale.server.answer import ChatForm
from blockscale.server.failure import ApiError, wrong_value
from blockscale.server.limits import Limits, Traffic
from blockscale.server.metrics import Metrics, engine_figures
from blockscale.server.stream import Streams

if TYPE_CHECKING:
    from blockscale.engine.engine import Stats

Result = TypeVar("Result")
_STATS_S = 1.0  # a long step may keep the engine busy


class RunningEngine(Protocol):
    """What the server asks of the engine in its thread."""

    def submit(
        self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str | None = None
    ) -> AsyncGenerator[Event]: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def busy_s(self) -> float: ...


@dataclass(frozen=True)
class Service:
    """tokenizer   of transformers; it is used by one thread at a time
    names       that requests may give as `model`; the first is the one that answers carry
    context     tokens of prompt and output together
    stats       the engine's figures of now
    form        how the chat template has the model write
    embedding   how the model embeds texts, or why it does not
    """

    engine: RunningEngine
    tokenizer: Any
    vocabulary: Vocabulary
    names: tuple[str, ...]
    context: int
    stats: Callable[[], Awaitable["Stats"]]
    form: ChatForm
    limits: Limits
    metrics: Metrics
    traffic: Traffic
    embedding: Embedding | str = NOT_TRAINED
    streams: Streams = field(default_factory=Streams)
    api_key: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    tokenizer_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        return self.names[0]

    async def ask_figures(self) -> None:
        """Brings the metrics' figures of the engine up to date; they stay as they were while it cannot answer."""
        with contextlib.suppress(TimeoutError, BlockscaleError):
            self.metrics.engine_figures = engine_figures(await asyncio.wait_for(self.stats(), _STATS_S))

    def check_model(self, name: str | None) -> None:
        """ApiError (404) for a model that is not served here."""
        if name is not None and name not in self.names:
            raise ApiError(
                f"there is no model '{name}'", status=404, param="model", code="model_not_found", hint=f"'{self.name}'"
            )

    def check_tokens(self, field: str, tokens: Sequence[int]) -> None:
        """ApiError (400) for a token that the tokenizer does not have."""
        unknown = next((token for token in tokens if token >= len(self.vocabulary.pieces)), None)
        if unknown is not None:
            raise wrong_value(field, f"there is no token {unknown}")

    def is_special(self, text: str) -> bool:
        """The text is a token of its own that leaves no text unless asked for."""
        return self.tokenizer.convert_tokens_to_ids(text) in self.vocabulary.special

    def text_of(self, tokens: Sequence[int]) -> str:
        """As the tokens stand, special ones included."""
        pieces = [self.vocabulary.piece(token) for token in tokens]
        return self.vocabulary.separator.join(pieces).decode("utf-8", "replace")

    async def with_tokenizer(self, work: Callable[[Any], Result]) -> Result:
        """The result of `work(tokenizer)`, off the event loop: a long prompt must not hold up other streams."""
        async with self.tokenizer_lock:
            return await asyncio.to_thread(work, self.tokenizer)
