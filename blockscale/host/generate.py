"""Text from a hosted model, through transformers' own generation."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockscale.errors import UsageError
from blockscale.host.model import HostedModel, check_ids, read_generation_config
from blockscale.host.skeleton import load_config


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0 takes the likeliest token each time; `seed` fixes what any other temperature draws."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.temperature < 0 or not 0 < self.top_p <= 1:
            raise UsageError(
                f"cannot sample with max_tokens {self.max_tokens}, temperature {self.temperature}, top_p {self.top_p}",
                hint="max_tokens >= 1, temperature >= 0, 0 < top_p <= 1",
            )


@dataclass(frozen=True)
class Completion:
    """`finish_reason` is "stop" (the model ended) or "length" (max_tokens reached)."""

    text: str
    num_tokens: int
    finish_reason: str


def generate(
    hosted: HostedModel, tokenizer: Any, prompt_ids: Sequence[int], sampling: Sampling, streamer: Any = None
) -> Completion:
    """Continues one prompt of token ids. `streamer`: a transformers streamer that gets tokens as they come."""
    from transformers import GenerationConfig

    if not prompt_ids:
        raise UsageError("the prompt is empty", hint="give at least one token of text")
    ids = torch.tensor([list(prompt_ids)], device=hosted.device)
    check_ids(ids, hosted.model)
    context = getattr(hosted.model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(context, int) and 0 < context <= ids.shape[1]:
        raise UsageError(f"the prompt has {ids.shape[1]} tokens: the model's context is {context}", hint="shorten it")
    is_sampling = sampling.temperature > 0
    ends = end_ids(hosted.model, tokenizer)
    config = GenerationConfig(
        max_new_tokens=sampling.max_tokens,
        do_sample=is_sampling,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        **({"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0} if is_sampling else {}),
    )
    with torch.inference_mode(), _seeded(sampling.seed if is_sampling else None):
        output: Tensor = hosted.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            streamer=streamer,
        )
    new = output[0, ids.shape[1] :].tolist()
    has_ended = bool(new) and new[-1] in ends
    text = tokenizer.decode(new, skip_special_tokens=True)
    return Completion(text, len(new), "stop" if has_ended else "length")


def end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Tokens that end a text: the generation config's, else the tokenizer's."""
    return _end_ids(model.generation_config, tokenizer)


def stored_end_ids(path: Path, tokenizer: Any) -> list[int]:
    """The same of the model in a folder, without loading it."""
    from transformers import GenerationConfig

    config = read_generation_config(path) or GenerationConfig.from_model_config(load_config(path))
    return _end_ids(config, tokenizer)


def _end_ids(config: Any, tokenizer: Any) -> list[int]:
    found = config.eos_token_id
    if found is None:
        found = tokenizer.eos_token_id
    if found is None:
        return []
    return list(found) if isinstance(found, list) else [int(found)]


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Draws from a generator state of its own and leaves the caller's as it was; without a seed, from the caller's."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def chat_ids(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a conversation through the model's chat template, ready for the assistant's turn."""
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("the model has no chat template", hint="use `blockscale generate` with a plain prompt")
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def text_streamer(tokenizer: Any, write: Callable[[str], None]) -> Any:
    """A transformers streamer that hands decoded text to `write` as it comes, without the prompt."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            write(text)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
