"""`blockscale serve` as users run it: a process, a checkpoint that this program quantized, OpenAI's own client."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
import torch

from blockscale import api
from blockscale.cli.main import main
from blockscale.llm import LLM

Find = Callable[[str], Path]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
QUESTION = [{"role": "user", "content": "What is it?"}]
NAME = "tiny-nvfp4"


@pytest.fixture(scope="module")
def checkpoint(tiny_model: Find, tmp_path_factory: pytest.TempPathFactory, calibration_text: Path) -> Path:
    """NVFP4 weights, an FP8 cache, and a chat template."""
    out = tmp_path_factory.mktemp("serve") / NAME
    how = {"calibration": [calibration_text], "max_calibration_tokens": 512, "kv_cache": "fp8"}
    api.quantize(tiny_model("llama"), out, "nvfp4", **how)  # type: ignore[arg-type]
    config = json.loads((out / "tokenizer_config.json").read_text())
    (out / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return out


class Served:
    """A running server: its process, its address, and OpenAI's client of it."""

    def __init__(self, checkpoint: Path, *options: str, key: str = "") -> None:
        command = [sys.executable, "-m", "blockscale", "serve", str(checkpoint), "--port", "0", "--device", "cpu"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "BLOCKSCALE_API_KEY": key}
        self.process = subprocess.Popen(
            [*command, "--num-pages", "64", *options], stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stderr
        self.said: list[str] = []
        for line in self.process.stderr:
            self.said.append(line)
            if "answers on" in line:
                break
        assert "http://127.0.0.1:" in self.said[-1], "".join(self.said)
        self.url = self.said[-1].split()[-1]
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key or "none", timeout=20, max_retries=0)

    def end(self) -> tuple[int, str]:
        """Its exit code, and what it has said since it answered."""
        self.process.send_signal(signal.SIGTERM)
        _, rest = self.process.communicate(timeout=20)
        return self.process.returncode, rest

    def kill(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[Served]:
    server = Served(checkpoint)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def local(checkpoint: Path) -> LLM:
    """The same model in this process: what the server should say."""
    return LLM(checkpoint, device="cpu", options=api.EngineOptions(num_pages=64))


def test_models(served: Served) -> None:
    assert [model.id for model in served.client.models.list()] == [NAME]
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4o'"):
        served.client.completions.create(model="gpt-4o", prompt="x")


def test_completions_are_the_model_s(served: Served, local: LLM) -> None:
    prompts = ["Hello", "2 + 2 ="]
    answer = served.client.completions.create(model=NAME, prompt=prompts, max_tokens=12, temperature=0, logprobs=3)
    expected = local.generate(prompts, max_tokens=12, logprobs=3)
    assert [c.text for c in answer.choices] == [c.text for c in expected]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(c.num_tokens for c in expected)
    for choice, own in zip(answer.choices, expected, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == pytest.approx([entry.logprob for entry in own.logprobs], abs=1e-4)
        assert all(len(top) >= 3 for top in choice.logprobs.top_logprobs or [])


def test_a_turn_and_its_stream(served: Served, local: LLM) -> None:
    how = {"model": NAME, "messages": QUESTION, "max_tokens": 16, "temperature": 0}
    whole = served.client.chat.completions.create(**how, logprobs=True, top_logprobs=2)
    expected = local.chat(QUESTION, api.Sampling(16))
    choice = whole.choices[0]
    assert choice.message.content == expected.text
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert len(choice.logprobs.content or []) == 16
    parts = list(served.client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == expected.text
    assert parts[-1].usage is not None
    assert whole.usage is not None
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens == 16
    assert len(parts) > 3


def test_stop_and_seed(served: Served, local: LLM) -> None:
    text = local.chat(QUESTION, api.Sampling(16)).text
    how = {"model": NAME, "messages": QUESTION, "max_tokens": 16}
    stopped = served.client.chat.completions.create(**how, temperature=0, stop=[text[4:7]]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (text[: text.index(text[4:7])], "stop")

    def drawn(seed: int) -> str | None:
        return served.client.chat.completions.create(**how, temperature=2.0, seed=seed).choices[0].message.content

    assert drawn(1) == drawn(1) != drawn(2)


def test_an_answer_of_a_schema(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rio", "Recife"]}, "is_large": {"type": "boolean"}},
        "required": ["city", "is_large"],
        "additionalProperties": False,
    }
    answer = served.client.chat.completions.create(
        model=NAME,
        messages=QUESTION,
        max_tokens=60,
        temperature=1.0,
        seed=5,
        logit_bias={str(ord(blank)): -100 for blank in "\t\n\r "},  # which JSON allows, and this model loves
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}},
    ).choices[0]
    found = json.loads(answer.message.content or "")
    assert found["city"] in ("Rio", "Recife")
    assert isinstance(found["is_large"], bool)
    assert answer.finish_reason == "stop"


def test_what_is_refused(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        served.client.completions.create(model=NAME, prompt="x", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="no_such_field"):
        served.client.completions.create(model=NAME, prompt="x", extra_body={"no_such_field": 1})
    with pytest.raises(openai.BadRequestError) as caught:
        served.client.completions.create(model=NAME, prompt="x" * 5000)
    assert caught.value.code == "context_length_exceeded"


def test_health_metrics_and_facts(served: Served) -> None:
    served.client.completions.create(model=NAME, prompt="Count", max_tokens=3)
    assert httpx.get(f"{served.url}/health").status_code == 200
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    figures = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
    assert figures["blockscale_output_tokens_total"] >= 3
    assert figures["blockscale_kv_pages"] == 64
    facts = httpx.get(f"{served.url}/info").json()["facts"]
    assert facts["kv_format"] == "fp8"
    assert {"nvfp4", "bf16"} <= {entry["format"] for entry in facts["formats"]}
    assert "<html" in httpx.get(served.url).text


def test_told_to_end_it_lets_what_runs_end(checkpoint: Path, local: LLM) -> None:
    """And keeps its key. The stream is longer than the signal takes."""
    server = Served(checkpoint, "--kv-cache", "bf16", "--name", "a", key="secret")
    try:
        with pytest.raises(openai.AuthenticationError):
            server.client.with_options(api_key="guess").models.list()
        stream = server.client.completions.create(
            model="a", prompt="Hello", max_tokens=500, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        parts = [next(stream)]
        server.process.send_signal(signal.SIGTERM)
        parts += stream
        assert parts[-1].choices[0].finish_reason == "length"
        code, said = server.end()
        assert (code, said) == (0, "")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
    finally:
        server.kill()


BAD = {
    "port taken": (["--port", "{taken}"], "cannot listen"),
    "no such model": (["{none}"], "no such model folder"),
    "no decoder": (["{cohere}"], "no decoder for 'cohere'"),
    "cache": (["--kv-cache", "fp9"], "no cache in 'fp9'"),
    "device": (["--device", "tpu"], "'tpu' is not available"),
    "no room": (["--max-context", "256", "--num-pages", "2"], "32 tokens would fit"),
    "pages": (["--num-pages", "0"], "num_pages cannot be 0"),
    "body": (["--max-body-mb", "0"], "--max-body-mb makes no sense"),
    "reference": (["--reference", "numbers.json"], "a reference without a text"),
    "scale of one side": (["{one-sided}"], "a value scale without a key scale"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(
    case: str, checkpoint: Path, tiny_model: Find, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, expected = BAD[case]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        places = {
            "{taken}": str(taken.getsockname()[1]),
            "{none}": str(tmp_path / "none"),
            "{cohere}": str(tiny_model("cohere")),
            "{one-sided}": str(_one_sided(checkpoint, tmp_path)),
        }
        argv = [places.get(option, option) for option in options]
        model = [] if argv[0] in places.values() and argv[0][0] == "/" else [str(checkpoint)]
        port = [] if "--port" in argv else ["--port", "0"]
        device = [] if "--device" in argv else ["--device", "cpu"]
        assert main(["serve", *model, *argv, *port, *device]) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("error: ") == 1
    assert "hint: " in said
    assert "Traceback" not in said


def _one_sided(checkpoint: Path, folder: Path) -> Path:
    from safetensors.torch import load_file, save_file

    target = shutil.copytree(checkpoint, folder / "one-sided")
    tensors: dict[str, torch.Tensor] = load_file(target / "model.safetensors")
    del tensors[next(name for name in tensors if name.endswith("k_scale"))]
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
