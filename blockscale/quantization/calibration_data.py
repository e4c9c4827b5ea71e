"""Token windows to calibrate on, from texts in given shares."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from blockscale.errors import UsageError
from blockscale.host.chat_template import chat_renderer
from blockscale.texts import Text, encode_text, read_text
from blockscale.texts.mix import Source, parse_mix
from blockscale.texts.short_words import ShortWords, short_words

WINDOW, MIN_WINDOW = 512, 8
MAX_TOKENS = 65_536
SELF = "self"  # among the texts' names: what the model itself writes, see `self_text`
SELF_TOKENS_ON_CPU = 16_384  # by default: one batch of windows
_SELF_NOTICE = (
    "no calibration text: the model writes its own; text like what it will read (--calibration FILE) serves better"
)


@dataclass(frozen=True)
class CalibratedText:
    """What was taken of one text: tokens, and the short words of the places that its windows cover."""

    name: str
    num_tokens: int
    words: ShortWords


@dataclass(frozen=True)
class CalibrationData:
    """Token windows [W, T] int64, and a digest of everything they depend on.

    texts         where they come from, in their order
    notices       what of the texts was not used as asked
    num_to_write  windows that the model itself has yet to write and `self_text` adds: `digest` covers them
    """

    windows: Tensor
    digest: str
    texts: tuple[CalibratedText, ...] = ()
    seed: int = 0
    notices: tuple[str, ...] = ()
    num_to_write: int = 0

    @property
    def num_tokens(self) -> int:
        return self.windows.numel()

    def to_dict(self) -> dict[str, object]:
        """For the checkpoint's record."""
        texts = [{"name": t.name, "num_tokens": t.num_tokens, "short_words": t.words.to_dict()} for t in self.texts]
        return {"seed": self.seed, "texts": texts}


def read_calibration(
    sources: Sequence[Source],
    tokenizer: Any,
    config: Mapping[str, Any],
    max_tokens: int | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> CalibrationData:
    """Windows of the texts that a user names, each perhaps with a weight (see `texts.mix`), for a model of `config`.

    SELF among them, or no text at all, leaves windows for the model to write. `max_tokens` by default: MAX_TOKENS, or
    what makes SELF's share the most that is written on `device`.

    Conversations go through the tokenizer's chat template. UsageError for whatever is wrong with a text.
    """
    parts = parse_mix(sources or [SELF])
    self_share = sum(part.share for part in parts if part.source == SELF)
    others = [part for part in parts if part.source != SELF]
    render = chat_renderer(tokenizer)
    texts = [read_text(part.source, render) for part in others]
    window = fitting_window(None, config)
    if max_tokens is None:
        most = SELF_TOKENS_ON_CPU if device == "cpu" else MAX_TOKENS
        max_tokens = min(MAX_TOKENS, int(most / self_share)) if self_share else MAX_TOKENS
    shares = [part.share for part in others]
    data = tokenize(texts, tokenizer.encode, max_tokens, window, shares=shares, seed=seed, self_share=self_share)
    return data if sources else replace(data, notices=(_SELF_NOTICE, *data.notices))


def fitting_window(window: int | None, config: Mapping[str, Any], num_before: int = 0) -> int:
    """`window`, or by default WINDOW if the model's context has room for it and `num_before` more. UsageError for a
    window that is larger than the context."""
    limit = (config.get("text_config") or config).get("max_position_embeddings")
    context = limit if isinstance(limit, int) and limit > 1 else None
    if window is None:
        return WINDOW if context is None else min(WINDOW, context - num_before)
    if context is not None and window > context:
        raise UsageError(
            f"windows of {window} tokens: the model's context is {context}", hint="give a smaller --window"
        )
    return window


def tokenize(
    texts: Sequence[Text],
    encode: Callable[[str], Sequence[int]],
    max_tokens: int = MAX_TOKENS,
    window: int = WINDOW,
    *,
    shares: Sequence[float] | None = None,
    seed: int = 0,
    self_share: float = 0.0,
) -> CalibrationData:
    """Windows from every text, each with BOS in front where the tokenizer adds one. `encode` is the tokenizer's own.

    shares       of the windows, by text; equal by default. A text that has too few gives all it has, and the others
                 take the rest; a notice says so. Every text gives one window at least.
    seed         0 takes windows evenly spaced through each text, any other draws them at random, none twice
    self_share   of the windows that are left for the model to write; with `shares` it sums to 1

    If the longest text is shorter than a window, it makes the window, unless the model writes some. UsageError for a
    text that is shorter still.
    """
    if max_tokens < 1:
        raise UsageError(f"cannot calibrate on {max_tokens} tokens", hint="give 1 or more")
    if not 0 <= seed < 2**63:
        raise UsageError(f"calibration seed {seed} is out of range", hint="give a whole number from 0 up")
    encoded = [encode_text(text.content, encode) for text in texts]
    longest = window if self_share else max(len(before) + len(tokens) for before, tokens in encoded)
    window = max(MIN_WINDOW, min(window, longest))
    lengths = [window - len(before) for before, _ in encoded]
    counts = [len(tokens) // length for (_, tokens), length in zip(encoded, lengths, strict=True)]
    for text, (_, tokens), count in zip(texts, encoded, counts, strict=True):
        if not count:
            raise UsageError(
                f"calibration text {text.name} has {len(tokens)} tokens: shorter than one window of {window} tokens",
                hint="give more text, or put short texts together in one file",
            )
    shares = [(1 - self_share) / max(1, len(texts))] * len(texts) if shares is None else shares
    total = max_tokens // window
    own = [max(1, total)] if self_share else []  # the model never runs out of text
    taken = share_out([*counts, *own], [*shares, self_share], total)
    num_windows, num_to_write = sum(taken), sum(taken[len(texts) :])
    taken = taken[: len(texts)]
    generator = torch.Generator().manual_seed(seed) if seed else None
    chosen, calibrated = [torch.empty(0, window, dtype=torch.int64)], []
    for text, (before, tokens), length, count, num in zip(texts, encoded, lengths, counts, taken, strict=True):
        starts = [index * length for index in _places(count, num, generator)]
        chosen.append(torch.tensor([before + tokens[start : start + length] for start in starts]))
        words = short_words(_covered(text.content, len(tokens), starts, length))
        calibrated.append(CalibratedText(text.name, num * window, words))
    windows = torch.cat(chosen)
    notices = (
        *(notice for text in texts for notice in text.notices),
        *_mix_notices(texts, shares, taken, counts, num_windows),
    )
    if seed and taken == counts and not self_share:
        notices += (f"the texts have no more than {sum(counts)} windows: all are taken, whatever the seed",)
    digest = _digest(windows, num_to_write, seed)
    return CalibrationData(windows, digest, tuple(calibrated), seed, notices, num_to_write)


def _digest(windows: Tensor, num_to_write: int, seed: int) -> str:
    """Of the windows, and of what decides those that are still to be written."""
    coming = f"{num_to_write} {seed}" if num_to_write else ""
    return hashlib.sha256(windows.numpy().tobytes() + coming.encode()).hexdigest()[:16]


def share_out(counts: Sequence[int], shares: Sequence[float], total: int) -> list[int]:
    """How many of `total` windows each text gives: its share, rounded down but one at least, or all its `counts` where
    that is less; what such texts leave goes to the others by their shares."""
    given: dict[int, int] = {}
    while True:
        still = [i for i in range(len(counts)) if i not in given]
        weight, rest = sum(shares[i] for i in still), total - sum(given.values())
        # a share of exactly so many windows must not become one less by a rounding error
        wanted = {i: max(1, int(rest * shares[i] / weight + 1e-9)) for i in still}
        short = [i for i in still if wanted[i] > counts[i]]
        given |= {i: counts[i] for i in short} if short else wanted
        if len(given) == len(counts):
            return [given[i] for i in range(len(counts))]


def _places(count: int, num: int, generator: torch.Generator | None) -> list[int]:
    """`num` of `count` places in order: evenly spaced, or drawn without replacement."""
    if generator is not None:
        return sorted(torch.randperm(count, generator=generator)[:num].tolist())
    step = max(1.0, count / num)
    return [int(i * step) for i in range(num)]


def _covered(content: str, num_tokens: int, starts: Sequence[int], length: int) -> str:
    """The characters of these windows, about: tokens are taken to be equally long all through a text."""
    each = len(content) / num_tokens
    return " ".join(content[int(start * each) : int((start + length) * each)] for start in starts)


def _mix_notices(
    texts: Sequence[Text], shares: Sequence[float], taken: Sequence[int], counts: Sequence[int], total: int
) -> list[str]:
    """Texts that are too short for their share of a mix of `total` windows."""
    if total == sum(taken[:1]):  # a text alone
        return []
    return [
        f"calibration text {text.name} has {count} windows: all are taken, {100 * num / total:.0f} % of the "
        f"calibration instead of {100 * share:.0f} %"
        for text, share, num, count in zip(texts, shares, taken, counts, strict=True)
        if num == count and num < int(total * share)
    ]
