"""Windows that a model writes itself: its own distribution, texts that end and begin, and what is refused."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockscale.errors import ModelError
from blockscale.host.documents import write_documents
from blockscale.host.model import HostedModel, load_model, load_tokenizer

Find = Callable[[str], Path]


class Characters:
    """A tokenizer of one token a character, as far as writing needs one. `before`: its BOS; `added`: other names."""

    def __init__(
        self, num_tokens: int = 128, before: Sequence[int] = (), eos: int | None = None, added: str = ""
    ) -> None:
        self.added = added
        self.num_tokens, self.before, self.eos_token_id = num_tokens, list(before), eos
        self.all_special_ids = [*self.before, *([] if eos is None else [eos])]

    def __len__(self) -> int:
        return self.num_tokens

    def get_added_vocab(self) -> dict[str, int]:
        return {name: ord(name) for name in self.added}

    def encode(self, text: str) -> list[int]:
        return [*self.before, *map(ord, text)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


@pytest.fixture
def hosted(tiny_model: Find) -> HostedModel:
    return load_model(tiny_model("llama"))


def write(hosted: HostedModel, tokenizer: object, count: int = 4, length: int = 40, seed: int = 1) -> Tensor:
    return write_documents(hosted, tokenizer, count, length, torch.Generator().manual_seed(seed))


def deviation(hosted: HostedModel, windows: Tensor, power: float | None = None) -> float:
    """By how many standard deviations the tokens are more surprising than their distributions' entropy. With `power`:
    by how many they would be if they had been drawn from p ** power."""
    log_p = hosted.logits(windows)[:, :-1].double().log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    variance = (log_p.exp() * log_p.square()).sum(-1) - entropy.square()
    if power is None:
        surprise = -log_p.gather(-1, windows[:, 1:, None])[..., 0]
    else:
        surprise = -((power * log_p).softmax(-1) * log_p).sum(-1)
    return float((surprise - entropy).sum() / variance.sum().sqrt())


def is_letter(token: int) -> bool:
    return chr(token).isalpha()


def test_tokens_come_from_all_of_the_models_distribution(hosted: HostedModel, tiny_model: Find) -> None:
    """Surprise is, on average, the entropy: neither a temperature nor a nucleus would give that, nor a cache that
    computes something else than the whole sequence does."""
    windows = write(hosted, load_tokenizer(tiny_model("llama")), 64, 60)
    assert (windows.shape, windows.dtype) == ((64, 60), torch.int64)
    assert abs(deviation(hosted, windows)) < 4
    assert deviation(hosted, windows, power=1.1) < -5, "so many tokens would show a temperature of 0.91"


def test_a_text_begins_with_an_ordinary_token(hosted: HostedModel) -> None:
    firsts = write(hosted, Characters(), 64, 2)[:, 0].tolist()
    assert all(is_letter(token) for token in firsts)
    assert len(set(firsts)) > 20
    firsts = write(hosted, Characters(added="abcdefghijklmnopqrstuvwxyz"), 64, 2)[:, 0].tolist()
    assert all(chr(token).isupper() for token in firsts), "what was added to the vocabulary is no text"


@pytest.mark.parametrize("before", [[], [1], [1, 2]])
def test_where_a_text_ends_the_next_begins(before: list[int], hosted: HostedModel) -> None:
    ends = [*range(32, 48), ord("a"), ord("b"), 1]  # the last is the tokenizer's own BOS
    hosted.model.generation_config.eos_token_id = ends
    windows = write(hosted, Characters(before=before), 8, 60).tolist()
    begun = 0
    for window in windows:
        assert window[: len(before)] == before
        places = [0, *(i + 1 for i in range(len(before), 60) if window[i] in ends and window[i : i + 1] != before[:1])]
        for place in places:
            start = window[place : place + len(before) + 1]
            if len(start) == len(before) + 1:
                assert start[:-1] == before
                assert is_letter(start[-1])
                assert start[-1] not in ends
                begun += 1
    assert begun > 3 * len(windows), "many a window holds several texts"


def test_the_tokenizers_end_counts_where_the_model_names_none(hosted: HostedModel) -> None:
    end = ord("e")
    pairs = write(hosted, Characters(eos=end), 32, 60).unfold(1, 2, 1).flatten(0, 1)
    after = pairs[pairs[:, 0] == end, 1].tolist()
    assert len(after) > 5
    assert all(is_letter(token) and token != end for token in after)


def test_only_tokens_that_a_text_can_hold(hosted: HostedModel, tiny_model: Find) -> None:
    assert int(write(hosted, Characters(num_tokens=100), 16, 60).max()) < 100, "the model's vocabulary is padded"
    seeing = load_model(tiny_model("gemma3"))
    assert seeing.model.config.image_token_index == 127
    windows = write(seeing, Characters(), 32, 60)
    assert not (windows == 127).any(), "a token that stands for an image"
    assert (windows == 126).any()


def test_a_generator_fixes_the_windows(hosted: HostedModel) -> None:
    torch.manual_seed(9)
    state = torch.get_rng_state()
    first = write(hosted, Characters())
    assert torch.equal(first, write(hosted, Characters()))
    assert not torch.equal(first, write(hosted, Characters(), seed=2))
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator is left alone"
    assert len({tuple(window) for window in first.tolist()}) == len(first)


def test_tokens_are_counted_as_they_come(hosted: HostedModel) -> None:
    seen: list[int] = []
    write_documents(hosted, Characters(before=[1]), 3, 10, torch.Generator().manual_seed(1), seen.append)
    assert seen == [9, 12, 15, 18, 21, 24, 27, 30]


def test_windows_shorter_than_a_beginning(hosted: HostedModel) -> None:
    assert write(hosted, Characters(before=[1, 2]), 3, 2).tolist() == [[1, 2]] * 3
    assert write(hosted, Characters(before=[1, 2]), 3, 3)[:, :2].tolist() == [[1, 2]] * 3


def test_a_damaged_model(hosted: HostedModel) -> None:
    hosted.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(ModelError, match="NaN or Inf on text that it writes itself"):
        write(hosted, Characters())


def test_what_cannot_write(hosted: HostedModel, tiny_model: Find) -> None:
    class Digits(Characters):
        def decode(self, ids: Sequence[int]) -> str:
            return "7\ufffd"

    with pytest.raises(ModelError, match="no token that is text") as error:
        write(hosted, Digits())
    assert "--calibration FILE" in error.value.hint
    with pytest.raises(ModelError, match="the model knows 128"):
        write(hosted, Characters(before=[400]))
    only_states = load_model(tiny_model("nemotron_h"))  # transformers counts tokens by an attention layer's cache
    with pytest.raises(ModelError, match="does not generate text") as error:
        write(only_states, Characters())
    assert "--calibration FILE" in error.value.hint


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "gpt_oss", "nemotron_h4", "deepseek_v3"])
def test_other_caches(family: str, tiny_model: Find) -> None:
    """Sliding windows, recurrent states, latents: the tokens are as likely under the whole sequence."""
    other = load_model(tiny_model(family))
    windows = write(other, Characters(), 16, 40)
    assert abs(deviation(other, windows)) < 4
