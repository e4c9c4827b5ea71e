"""Text to token windows, with one written rule for what is scored.

The text is cut at the character `start` of the way in, tokenized in one piece without special tokens, and cut off
after `max_tokens` tokens. Window i holds the tokens [i * stride, i * stride + window), and, in front of them, the
special tokens that the tokenizer itself puts at the beginning of a text (BOS, for the models that want one; it comes
on top of `window`). With stride = window the windows do not overlap; the last one may be shorter.

Scored are all tokens that have something before them and were not scored in an earlier window: every token but the
first of the text with stride < window, every token but the first of each window with stride = window, and every
token where there is a BOS. Special tokens are context and never scored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.errors import UsageError
from blockscale.texts import encode_text


@dataclass(frozen=True)
class Window:
    """One forward pass: the last `num_scored` of `ids` are targets, what stands before them is context."""

    ids: Tensor  # [T] int64, with BOS where the tokenizer adds one
    num_scored: int  # 1 .. T-1


@dataclass(frozen=True)
class TokenWindows:
    """The windows of one text, and the rule that made them, in a sentence."""

    windows: tuple[Window, ...]
    convention: str

    @property
    def num_tokens(self) -> int:
        """Tokens that are scored."""
        return sum(w.num_scored for w in self.windows)


def describe(window: int, stride: int, has_bos: bool, start: float, max_tokens: int | None) -> str:
    """The convention in sentences, for reports."""
    overlap = "without overlap" if stride == window else f"every {stride} tokens, the last {stride} of each scored"
    amount = "all tokens" if max_tokens is None else f"at most {max_tokens} tokens"
    where = f" from {100 * start:g} % into the text" if start else ""
    bos = (
        "The beginning-of-sequence token in front of each is not scored."
        if has_bos
        else "The tokenizer adds no beginning-of-sequence token, so a token without context is not scored."
    )
    return (
        f"Windows of {window} tokens {overlap}, {amount}{where}. {bos} "
        "Perplexity is exp of the mean negative log-likelihood of the scored tokens."
    )


def token_windows(
    text: str,
    encode: Callable[[str], Sequence[int]],
    window: int = 512,
    stride: int | None = None,
    start: float = 0.0,
    max_tokens: int | None = None,
) -> TokenWindows:
    """Windows of `text`. `encode` is the tokenizer's own, special tokens included; `stride` defaults to `window`."""
    stride = window if stride is None else stride
    if window < 2 or not 1 <= stride <= window:
        raise UsageError(
            f"window {window} and stride {stride} make no windows",
            hint="give a window of 2 or more and a stride up to it",
        )
    if not 0 <= start < 1:
        raise UsageError(f"start {start} is not a fraction of the text", hint="give a number from 0 up to 1")
    if max_tokens is not None and max_tokens < 2:
        raise UsageError(f"max_tokens {max_tokens} leaves nothing to score", hint="give 2 or more")
    before, tokens = encode_text(text[int(start * len(text)) :], encode)
    tokens = tokens[:max_tokens]
    windows = []
    num_done = 0  # tokens that an earlier window scored, or that nothing can score
    for begin in range(0, len(tokens), stride):
        end = min(begin + window, len(tokens))
        num_scored = end - max(num_done, begin if before else begin + 1)
        if num_scored > 0:
            windows.append(Window(torch.tensor(before + tokens[begin:end], dtype=torch.int64), num_scored))
        num_done = end
        if end == len(tokens):
            break
    if not windows:
        raise UsageError(
            f"the text has {len(tokens)} tokens after its start, which leaves nothing to score",
            hint="give a longer text, or start earlier in it",
        )
    return TokenWindows(tuple(windows), describe(window, stride, bool(before), start, max_tokens))
