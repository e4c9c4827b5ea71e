"""Log-probabilities in the two shapes that OpenAI's API has."""

from collections.abc import Sequence
from typing import Any

from blockscale.engine.request import TokenLogprob
from blockscale.engine.vocabulary import Vocabulary

_FLOOR = -9999.0  # JSON has no -Infinity; as OpenAI writes it


def chat_logprobs(vocabulary: Vocabulary, logprobs: Sequence[TokenLogprob], num_top: int) -> dict[str, Any]:
    """Of an answer's tokens, thoughts and calls included."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        piece = vocabulary.piece(token)
        return {"token": piece.decode("utf-8", "replace"), "logprob": _number(logprob), "bytes": list(piece)}

    return {
        "content": [
            {**entry(own.token_id, own.logprob), "top_logprobs": [entry(t, value) for t, value in own.top[:num_top]]}
            for own in logprobs
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """The lists of one choice, chunk after chunk; `text_offset` counts characters from the start of the text."""

    def __init__(self, vocabulary: Vocabulary, num_top: int) -> None:
        self._vocabulary = vocabulary
        self._num_top = num_top
        self._offset = 0

    def next(self, logprobs: Sequence[TokenLogprob], first: int | None = None) -> dict[str, Any]:
        """`first`: a prompt's first token, which stands in front; nothing says how likely it was."""
        lists: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        if first is not None:
            lists = {
                "text_offset": [0],
                "token_logprobs": [None],
                "tokens": [self._text(first)],
                "top_logprobs": [None],
            }
            self._offset += self._length(first)
        for logprob in logprobs:
            text = self._text(logprob.token_id)
            lists["text_offset"].append(self._offset)
            lists["tokens"].append(text)
            lists["token_logprobs"].append(_number(logprob.logprob))
            lists["top_logprobs"].append(self._top(logprob))
            self._offset += self._length(logprob.token_id)
        return lists

    def skip(self, text: str) -> None:
        """Text that stands before the first token."""
        self._offset += len(text)

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        """The likeliest and the chosen one; of tokens with the same text the likeliest."""
        found: dict[str, float] = {}
        for token, value in (*logprob.top[: self._num_top], (logprob.token_id, logprob.logprob)):
            found.setdefault(self._text(token), _number(value))
        return found

    def _length(self, token: int) -> int:
        return len(self._vocabulary.piece(token).decode("utf-8", "replace"))

    def _text(self, token: int) -> str:
        """What is no UTF-8 by itself is written as its bytes, so that different tokens differ."""
        piece = self._vocabulary.piece(token)
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _number(logprob: float) -> float:
    return max(logprob, _FLOOR)
