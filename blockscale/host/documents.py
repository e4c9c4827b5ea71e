"""Texts that a hosted model writes by itself, as windows of tokens: what it thinks that text looks like.

    window = start of a text (BOS, or nothing), an ordinary token drawn evenly from the vocabulary, tokens from the
             model's own distribution at temperature 1 ... end of the text, start of the next, an ordinary token ...

All of the distribution is drawn from: a nucleus would leave out the rare inputs that calibration is to see. The even
first token is what makes texts differ, in language too (LLM-QAT, arXiv 2305.17888, starts so). A token is drawn as the
first whose cumulated probability passes one uniform number, in float64, so that a generator on the CPU serves every
device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from blockscale.errors import ModelError
from blockscale.host.generate import end_ids
from blockscale.host.model import HostedModel, check_ids
from blockscale.texts import special_tokens

GIVE_TEXT = "give calibration text instead: --calibration FILE"
_OF_TEXTS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id")
_MAX_TRIES = 10_000  # for an ordinary token; a vocabulary of bytes has one in five


def write_documents(
    hosted: HostedModel,
    tokenizer: Any,
    count: int,
    length: int,
    generator: torch.Generator,
    report: Callable[[int], None] = lambda num_tokens: None,
) -> Tensor:
    """`count` windows [count, length] int64, written side by side with a cache of keys and values.

    generator   on the CPU; its state fixes the windows (on a CPU with as many threads)
    report      gets the number of tokens written so far, after each step

    ModelError for a model that gives NaN or Inf, or that does not generate.
    """
    from transformers import GenerationConfig

    ends = end_ids(hosted.model, tokenizer)
    forbidden = _placeholders(hosted.model, ends)
    starts = _Starts(hosted.model, tokenizer, (*ends, *forbidden))
    writer = _Writer(starts, ends, forbidden, generator, report)
    prompt = torch.tensor([writer.begin() for _ in range(count)])[:, :length]
    check_ids(prompt, hosted.model)
    if prompt.shape[1] == length:
        return prompt
    config = GenerationConfig(
        max_new_tokens=length - prompt.shape[1],
        do_sample=False,  # the writer leaves one token to choose
        eos_token_id=hosted.model.get_input_embeddings().weight.shape[0],  # no token: a window goes on after a text
        pad_token_id=0,
    )
    ids = prompt.to(hosted.device)
    try:
        with torch.no_grad():
            windows: Tensor = hosted.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                logits_processor=[writer],
            )
    except (AttributeError, NotImplementedError, TypeError, ValueError, IndexError) as e:
        raise ModelError(f"the model does not generate text: {type(e).__name__}: {e}", hint=GIVE_TEXT) from e
    return windows.cpu()


class _Writer:
    """Chooses every window's next token, as a logits processor of transformers: all others get -inf."""

    def __init__(
        self,
        starts: "_Starts",
        ends: Sequence[int],
        forbidden: Sequence[int],
        generator: torch.Generator,
        report: Callable[[int], None],
    ) -> None:
        self._starts, self._ends, self._forbidden = starts, frozenset(ends), list(forbidden)
        self._generator, self._report = generator, report
        self._coming: dict[int, list[int]] = {}  # of windows in which a text begins: its first tokens

    def begin(self) -> list[int]:
        return self._starts.draw(self._generator)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Tokens so far [B, T], logits [B, V] -> [B, V]."""
        chosen = self._draw(scores)
        for row, last in enumerate(input_ids[:, -1].tolist()):
            if last in self._ends and row not in self._coming:
                self._coming[row] = self.begin()
            if coming := self._coming.get(row):
                chosen[row] = coming.pop(0)
                if not coming:
                    del self._coming[row]
        self._report(input_ids.numel() + len(chosen))
        only = torch.full_like(scores, -torch.inf)
        return only.scatter_(1, chosen[:, None], 0.0)

    def _draw(self, scores: Tensor) -> Tensor:
        """One token a row, int64 [B], of those that a text can hold."""
        logits = scores.float().clone()
        logits[:, [i for i in self._forbidden if i < logits.shape[1]]] = -torch.inf
        logits[:, self._starts.num_tokens :] = -torch.inf
        cumulated = logits.softmax(-1).cumsum(-1, dtype=torch.float64)  # [B, V]
        if not torch.isfinite(cumulated[:, -1]).all():
            raise ModelError(
                "the model gives NaN or Inf on text that it writes itself",
                hint="the model is damaged or needs more than its stored precision",
            )
        uniform = torch.rand(len(logits), 1, generator=self._generator, dtype=torch.float64).to(cumulated.device)
        token = torch.searchsorted(cumulated, uniform * cumulated[:, -1:], right=True)
        return token[:, 0].clamp(max=self._starts.num_tokens - 1)


class _Starts:
    """First tokens of a text: what the tokenizer puts before every text, and an ordinary token.

    Ordinary is what stands for whole characters, a letter among them, and was learned from text: not special, not added
    (Gemma has 6384 of those, most of them unused), not in `others`.
    """

    def __init__(self, model: Any, tokenizer: Any, others: Sequence[int]) -> None:
        self.num_tokens = min(len(tokenizer), model.get_input_embeddings().weight.shape[0])
        self._tokenizer = tokenizer
        self._special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values(), *others}
        self._before, _ = special_tokens(tokenizer.encode)

    def draw(self, generator: torch.Generator) -> list[int]:
        for _ in range(_MAX_TRIES):
            token = int(torch.randint(self.num_tokens, (), generator=generator))
            if token not in self._special and self._is_text(token):
                return [*self._before, token]
        raise ModelError("the tokenizer has no token that is text", hint=GIVE_TEXT)

    def _is_text(self, token: int) -> bool:
        text = self._tokenizer.decode([token])
        return "\ufffd" not in text and any(character.isalpha() for character in text)


def _placeholders(model: Any, ends: Sequence[int]) -> list[int]:
    """Tokens that stand for images or sounds: no text holds them, and a model may refuse one without its image."""
    found: set[int] = set()
    for config in (model.config, model.config.get_text_config()):
        for name, value in config.to_dict().items():
            if name.endswith(("_token_id", "_token_index")) and name not in _OF_TEXTS and isinstance(value, int):
                found.add(value)
    return sorted(token for token in found - {*ends} if token >= 0)
