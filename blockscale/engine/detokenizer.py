"""Text of an output as it grows: whole characters only, and nothing that may still become a stop string."""

import codecs
from collections.abc import Sequence

from blockscale.engine.sampling import Sampling
from blockscale.engine.vocabulary import Vocabulary


class Detokenizer:
    """The text of one request.

    Tokens go in one at a time, text that is final comes out; all that came out, joined, is the output's text. Bytes
    that are no UTF-8 come out as U+FFFD, half a character at the very end does not.

    stopped_by  the stop string that ended the text; nothing comes out after it
    """

    def __init__(self, vocabulary: Vocabulary, sampling: Sampling) -> None:
        self.stopped_by: str | None = None
        self._vocabulary = vocabulary
        self._sampling = sampling
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._num_tokens = 0
        self._has_text = False

    def push(self, token: int) -> str:
        """Takes the next token, and returns what became final by it."""
        if self.stopped_by is not None:
            return ""
        self._num_tokens += 1
        self._held += self._decoder.decode(self._bytes(token))
        if self._num_tokens < self._sampling.min_tokens:
            return self._release(len(self._held))
        found = first_stop(self._held, self._sampling.stop)
        if found is None:
            return self._release(len(self._held) - num_held(self._held, self._sampling.stop))
        at, self.stopped_by = found
        text = self._release(at)
        self._held = ""
        return text

    def finish(self) -> str:
        """What was held back, at the end of the output: it became no stop string."""
        return self._release(len(self._held))

    def _bytes(self, token: int) -> bytes:
        vocabulary = self._vocabulary
        if token in vocabulary.special and self._sampling.skip_special_tokens:
            return b""
        piece = (vocabulary.separator if self._has_text else b"") + vocabulary.piece(token)
        self._has_text = True
        return piece

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the stop string begins that is complete first, and the string; of two, the longer.

    The one that is complete first is the same however the text was cut into tokens.
    """
    found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return None
    end, _, stop = min(found)
    return end - len(stop), stop


def num_held(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of `text` with which a stop string begins."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
