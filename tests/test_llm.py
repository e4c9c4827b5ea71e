"""`LLM`: on the engine it says what transformers says, and where there is no decoder transformers says it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.running import transformers_logits

from blockscale.engine.llm import generate
from blockscale.engine.options import EngineOptions
from blockscale.engine.sampling import Sampling
from blockscale.errors import CheckpointError, ModelError, UsageError
from blockscale.host import generate as host
from blockscale.host.model import load_model
from blockscale.llm import LLM

Find = Callable[[str], Path]
PROMPTS = ("Hello", "2 + 2 =", "The cat sat on the mat, and the mat")
FAMILIES = ("llama", "qwen2", "qwen3", "phi3", "gemma3_text", "gemma3", "mixtral", "qwen3_moe", "gpt_oss")
CHECKPOINTS = ("modelopt_llama_nvfp4", "ct_llama_nvfp4a16", "modelopt_llama_nvfp4_awq_lite", "modelopt_qwen3moe_nvfp4")
NUM = 20
# Logits of both sides over the same bfloat16 cache differ in fp32's rounding, and where a key or value lies between two
# bfloat16, by a step of 2^-8 of one term: see tests of the families. Logits here are of the size of 1.
GAP = 4e-3


def llm(path: Path, **options: Any) -> LLM:
    return LLM(path, device="cpu", options=EngineOptions(num_pages=24, max_running=4), **options)


@pytest.mark.parametrize("name", [*FAMILIES, *CHECKPOINTS])
def test_greedy_takes_what_transformers_finds_likeliest(name: str, tiny_model: Find, with_tokenizer: Find) -> None:
    path = tiny_model(name) if name in FAMILIES else with_tokenizer(name)
    model = llm(path)
    assert model.notices == ()
    assert model.engine is not None
    prompts = [model.tokenizer.encode(prompt) for prompt in PROMPTS]
    outputs = generate(model.engine, prompts, Sampling(NUM))
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = transformers_logits(path, torch.tensor([*prompt, *output.token_ids[:-1]]))[len(prompt) - 1 :]
        taken = logits.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        assert (logits.amax(1) - taken).max() < GAP
        assert logits.std() > 10 * GAP, "any token would do"
    assert len({output.token_ids for output in outputs}) == len(outputs)


def test_its_text_is_that_of_transformers(tiny_model: Find) -> None:
    """Where no two tokens are as good as equal, to the letter; transformers puts spaces between this tokenizer's."""
    path = tiny_model("llama")
    hosted, model = load_model(path), llm(path)
    found = model.generate(PROMPTS, max_tokens=NUM)
    for prompt, completion in zip(PROMPTS, found, strict=True):
        expected = host.generate(hosted, model.tokenizer, model.tokenizer.encode(prompt), host.Sampling(NUM))
        assert completion.text.replace(" ", "") == expected.text.replace(" ", "")
        assert (completion.num_tokens, completion.finish_reason) == (expected.num_tokens, expected.finish_reason)


def test_rounded_inputs(with_tokenizer: Find) -> None:
    path = with_tokenizer("modelopt_llama_nvfp4")
    prompt = ["The quick brown fox"]
    plain, rounded = (llm(path, emulate_activations=e).generate(prompt, logprobs=0, max_tokens=1)[0] for e in (0, 1))
    logits = transformers_logits(path, torch.tensor(llm(path).tokenizer.encode(prompt[0])), is_emulating=True)
    top = logits[-1].log_softmax(-1).max()
    assert rounded.logprobs[0].logprob == pytest.approx(float(top), abs=0.02)
    assert rounded.logprobs[0].logprob != plain.logprobs[0].logprob


def test_what_the_engine_serves_beyond_transformers(tiny_model: Find) -> None:
    model = llm(tiny_model("llama"))
    (whole,) = model.generate(["Hello"], max_tokens=NUM)
    stop = whole.text[6:8]
    (stopped,) = model.generate(["Hello"], max_tokens=NUM, stop=[stop], logprobs=2)
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert len(stopped.logprobs) == stopped.num_tokens
    assert [len(entry.top) for entry in stopped.logprobs] == [2] * stopped.num_tokens
    one = {"temperature": 5.0, "seed": 3, "max_tokens": NUM}
    assert model.generate(["Hello"], **one, top_k=1)[0].text == whole.text
    drawn = model.generate(["Hello", "Hello"], **one)
    assert drawn[0] == drawn[1] != whole
    assert model.generate(["Hello"], **one) == drawn[:1]
    forced = ord("~")
    assert model.generate(["Hello"], max_tokens=3, logit_bias={forced: 1000.0})[0].text == "~~~"
    (number,) = model.generate(["Hello"], max_tokens=NUM, regex="[0-9]{3}", ignore_eos=False)
    assert number.text.isdigit()
    assert len(number.text) == 3
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    blanks = dict.fromkeys(map(ord, "\t\n\r "), -1000.0)  # which JSON allows, and this model loves
    (structured,) = model.generate(["Hello"], max_tokens=30, json_schema=schema, logit_bias=blanks)
    assert json.loads(structured.text)["a"] in (1, 2)
    assert model.generate(["Hello"], max_tokens=NUM, stop=stop)[0].text == stopped.text
    written: list[str] = []
    assert model.stream("Hello", Sampling(NUM), written.append) == whole
    assert "".join(written) == whole.text
    assert model.engine is not None
    model.engine.check_integrity()


def test_bad_arguments(tiny_model: Find) -> None:
    model = llm(tiny_model("llama"))
    with pytest.raises(UsageError, match="one string"):
        model.generate("Hello")
    with pytest.raises(UsageError, match="called topk, width"):
        model.generate(["Hello"], width=3, topk=5)
    with pytest.raises(UsageError, match="top_k cannot be -1"):
        model.generate(["Hello"], top_k=-1)
    with pytest.raises(UsageError, match="the prompt is empty"):
        model.generate(["Hello", ""])
    with pytest.raises(UsageError, match="no chat template"):
        model.chat([{"role": "user", "content": "Hi"}], Sampling(1))
    assert model.generate([]) == []
    assert model.generate(["Hello"], max_tokens=1)[0].num_tokens == 1, "it goes on"


def test_turns_through_the_template(tiny_model: Find, tmp_path: Path) -> None:
    path = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    config = json.loads((path / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}>"
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    model, written = llm(path), []
    answer = model.chat([{"role": "user", "content": "Hi"}], Sampling(6), written.append)
    assert answer == model.generate(["<user>Hi>"], max_tokens=6)[0]
    assert "".join(written) == answer.text


@pytest.mark.parametrize("family", ["cohere", "starcoder2", "deepseek_v3"])
def test_what_the_engine_cannot_run_transformers_runs(family: str, tiny_model: Find) -> None:
    """No decoder, or (DeepSeek of this size) heads that no kernel takes."""
    path = tiny_model(family)
    model = LLM(path, device="cpu")
    assert model.engine is None
    (notice,) = model.notices
    assert notice.endswith("transformers runs it, more slowly")
    ids = model.tokenizer.encode("Hello")
    expected = host.generate(load_model(path), model.tokenizer, ids, host.Sampling(8))
    (found,) = model.generate(["Hello"], max_tokens=8)
    assert (found.text, found.num_tokens, found.finish_reason) == tuple(vars(expected).values())
    written: list[str] = []
    assert model.stream("Hello", Sampling(8), written.append).text == "".join(written) == found.text
    warm = {"temperature": 3.0, "max_tokens": 8}
    assert model.generate(["Hello"], **warm, seed=1) == model.generate(["Hello"], **warm, seed=1)
    with pytest.raises(UsageError, match="min_p, stop: only the engine"):
        model.generate(["Hello"], stop=["x"], min_p=0.5)


def test_options_of_the_engine_need_it(tiny_model: Find) -> None:
    with pytest.raises(ModelError, match="no decoder for 'cohere'"):
        LLM(tiny_model("cohere"), device="cpu", kv_cache="fp8")
    with pytest.raises(ModelError, match="no decoder for 'cohere'"):
        LLM(tiny_model("cohere"), device="cpu", options=EngineOptions())


def test_a_variant_without_a_decoder(tiny_model: Find, tmp_path: Path) -> None:
    """The family is known, and something in the config is not."""
    path = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    model = LLM(path, device="cpu")
    assert "no activation 'relu'" in model.notices[0]
    assert model.generate(["Hello"], max_tokens=3)[0].num_tokens == 3


def test_a_broken_checkpoint_is_no_reason_for_transformers(tiny_model: Find, tmp_path: Path) -> None:
    path = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError):
        LLM(path, device="cpu")
