"""Generation through transformers: greedy, sampled, streamed, and where it ends."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from blockscale.errors import UsageError
from blockscale.host.generate import Sampling, chat_ids, generate, text_streamer
from blockscale.host.model import HostedModel, load_model, load_tokenizer

PROMPT = [72, 101, 108, 108, 111]


@pytest.fixture(scope="module")
def hosted(tiny_model: Callable[[str], Path]) -> HostedModel:
    return load_model(tiny_model("llama"))


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Callable[[str], Path]):
    return load_tokenizer(tiny_model("llama"))


def greedy(hosted: HostedModel, count: int) -> list[int]:
    """Token by token from whole sequences, without a cache."""
    ids = list(PROMPT)
    for _ in range(count):
        ids.append(int(hosted.logits(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(PROMPT) :]


def test_greedy_takes_the_likeliest(hosted: HostedModel, tokenizer) -> None:
    completion = generate(hosted, tokenizer, PROMPT, Sampling(max_tokens=12))
    assert completion.text == tokenizer.decode(greedy(hosted, 12))
    assert (completion.num_tokens, completion.finish_reason) == (12, "length")


def test_it_ends_at_an_end_token(tiny_model: Callable[[str], Path], tokenizer) -> None:
    hosted = load_model(tiny_model("llama"))
    expected = greedy(hosted, 8)
    end = expected[3]
    hosted.model.generation_config.eos_token_id = [end, 127]
    completion = generate(hosted, tokenizer, PROMPT, Sampling(max_tokens=8))
    assert completion.num_tokens == expected.index(end) + 1
    assert completion.finish_reason == "stop"


def test_a_seed_fixes_the_draw(hosted: HostedModel, tokenizer) -> None:
    def sample(seed: int | None) -> str:
        return generate(hosted, tokenizer, PROMPT, Sampling(20, temperature=1.5, seed=seed)).text

    torch.manual_seed(9)
    state = torch.get_rng_state()
    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator is left alone"
    assert sample(None) != sample(None)


def test_a_nucleus_of_almost_nothing_is_greedy(hosted: HostedModel, tokenizer) -> None:
    tight = generate(hosted, tokenizer, PROMPT, Sampling(10, temperature=1.0, top_p=1e-6, seed=0))
    assert tight.text == generate(hosted, tokenizer, PROMPT, Sampling(10)).text


def test_the_stream_is_the_text(hosted: HostedModel, tokenizer) -> None:
    pieces: list[str] = []
    completion = generate(hosted, tokenizer, PROMPT, Sampling(12), text_streamer(tokenizer, pieces.append))
    assert "".join(pieces) == completion.text
    assert len(pieces) > 1


@pytest.mark.parametrize("change", [{"max_tokens": 0}, {"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_settings_that_make_no_sense(change: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="cannot sample"):
        dataclasses.replace(Sampling(), **change)


def test_an_empty_prompt(hosted: HostedModel, tokenizer) -> None:
    with pytest.raises(UsageError, match="the prompt is empty"):
        generate(hosted, tokenizer, [], Sampling(1))


def test_chat(tiny_model: Callable[[str], Path], tokenizer, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(UsageError, match="no chat template"):
        chat_ids(tokenizer, messages)
    folder = tmp_path / "m"
    shutil.copytree(tiny_model("llama"), folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}>")
    with_template = load_tokenizer(folder)
    assert with_template.decode(chat_ids(with_template, messages)).replace(" ", "") == "<user>Hi>"
