"""The server over the real engine, with a model whose output is known: every answer is right, and nothing is left
behind. Needs nothing."""

import concurrent.futures
import json
import math
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from blockscale.engine.engine import Engine
from blockscale.engine.options import EngineOptions
from blockscale.engine.vocabulary import read_vocabulary
from blockscale.errors import UsageError
from blockscale.server.run import listen, make_reference
from tests.engine.fake_decoder import VOCAB_SIZE, FakeModel, greedy, logits_of, running_hashes
from tests.server.running import Running, check_nothing_is_left, letters, over, read_metrics

ROOT = Path(__file__).parents[2]
TEXT = "/v1/completions"
OPTIONS = EngineOptions(num_pages=24, max_running=4, max_step_tokens=24, max_context=128)


@pytest.fixture
def engine() -> Engine:
    return Engine(FakeModel(), OPTIONS, vocabulary=read_vocabulary(letters(size=VOCAB_SIZE)))


@pytest.fixture
def server(engine: Engine) -> Iterator[Running]:
    with over(engine, letters(size=VOCAB_SIZE)) as it:
        yield it
        check_nothing_is_left(it, engine)


def expected(prompt: str, num: int) -> str:
    """`?` stands for what the tokenizer does not know: a special token, which leaves no text."""
    return "".join(map(chr, greedy([ord(c) for c in prompt], num))).replace("?", "")


def test_many_at_once_are_each_right(server: Running) -> None:
    """More than fit in the pages; some are streams, some leave, some are malformed."""
    chance = random.Random(4)
    prompts = [
        "".join(chr(chance.randrange(32, VOCAB_SIZE)) for _ in range(chance.randrange(1, 60))) for _ in range(40)
    ]

    def ask(i: int) -> None:
        prompt, num = prompts[i], 5 + i % 30
        body = {"model": "tiny", "prompt": prompt, "max_tokens": num, "temperature": 0}
        if i % 10 == 3:
            with server.client.stream("POST", TEXT, json={**body, "stream": True}) as response:
                next(response.iter_lines())
        elif i % 10 == 7:
            assert server.post(TEXT, **{**body, "temperature": -1}).status_code == 400
        elif i % 2:
            answer = server.post(TEXT, **body).json()
            assert answer["choices"][0]["text"] == expected(prompt, num)
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == num
        else:
            whole = server.post(TEXT, **body, stream=True).text.removesuffix("data: [DONE]\n\n")
            events = [json.loads(line.removeprefix("data: ")) for line in whole.splitlines() if line]
            assert "".join(e["choices"][0]["text"] for e in events) == expected(prompt, num)

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        list(pool.map(ask, range(len(prompts))))


def test_scores_of_a_prompt_are_the_model_s(server: Running) -> None:
    prompt = "SCORE THIS, TOKEN BY TOKEN."
    ids = [ord(c) for c in prompt]
    answer = server.post(TEXT, model="tiny", prompt=ids, max_tokens=1, logprobs=1, echo=True, temperature=0).json()
    found = answer["choices"][0]["logprobs"]
    states = running_hashes(ids)
    for i in range(1, len(ids)):
        logprobs = logits_of(states[i - 1]).log_softmax(-1)
        assert found["token_logprobs"][i] == pytest.approx(float(logprobs[ids[i]]), abs=1e-5)
        assert max(found["top_logprobs"][i].values()) == pytest.approx(float(logprobs.max()), abs=1e-5)
    assert found["tokens"] == [*prompt, chr(greedy(ids, 1)[0])]
    assert answer["choices"][0]["text"] == prompt + expected(prompt, 1)


def test_n_choices_differ_by_seed_and_come_again(server: Running) -> None:
    body = {"model": "tiny", "prompt": "SEEDS", "n": 3, "seed": 9, "max_tokens": 12, "temperature": 2.0}
    first = [c["text"] for c in server.post(TEXT, **body).json()["choices"]]
    assert len(set(first)) == 3
    assert [c["text"] for c in server.post(TEXT, **body).json()["choices"]] == first
    alone = server.post(TEXT, **{**body, "n": 1, "seed": 10}).json()["choices"][0]["text"]
    assert alone == first[1]


def test_stop_strings_and_the_context(server: Running) -> None:
    whole = expected("STOP", 30)
    body = {"model": "tiny", "prompt": "STOP", "max_tokens": 30, "temperature": 0}
    choice = server.post(TEXT, **body, stop=whole[10:13]).json()["choices"][0]
    assert choice["text"] == whole[: whole.index(whole[10:13])]
    assert choice["finish_reason"] == "stop"
    assert server.post(TEXT, model="tiny", prompt="A" * 128).json()["error"]["code"] == "context_length_exceeded"
    messages = [{"role": "user", "content": "A"}]  # lower-case letters are unknown to this model, and read as `?`
    chat = server.post("/v1/chat/completions", model="tiny", messages=messages, temperature=0).json()
    assert chat["usage"]["total_tokens"] == 128
    assert chat["choices"][0]["finish_reason"] == "length"


def test_the_engine_s_figures(server: Running) -> None:
    server.post(TEXT, model="tiny", prompt="A" * 40, max_tokens=4)
    server.post(TEXT, model="tiny", prompt="A" * 40, max_tokens=4)
    figures = read_metrics(server.get("/metrics").text)
    assert figures["blockscale_kv_pages"] == 24
    assert figures["blockscale_kv_usage_ratio"] == 0
    assert figures["blockscale_kv_kept_ratio"] > 0
    assert figures["blockscale_cached_prompt_tokens_total"] == 32
    assert figures["blockscale_steps"] > 4


def test_a_reference_from_the_engine(engine: Engine, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A FIXED TEXT. " * 20)
    tokenizer = letters(size=VOCAB_SIZE)
    numbers = make_reference(engine, tokenizer, read_vocabulary(tokenizer), text, tmp_path / "n.json", "tiny")
    ids = [ord(c) for c in text.read_text()]
    nll = []
    for begin in range(0, len(ids), 127):  # the context holds one token more than the window
        window = ids[begin : begin + 127]
        states = running_hashes(window)
        nll += [-float(logits_of(states[i - 1]).log_softmax(-1)[window[i]]) for i in range(1, len(window))]
    assert numbers.perplexity == pytest.approx(math.exp(sum(nll) / len(nll)), rel=1e-5)
    assert torch.isfinite(torch.tensor(numbers.perplexity))


def test_a_port_that_is_taken() -> None:
    listener = listen("127.0.0.1", 0)
    assert listener.proto == socket.IPPROTO_TCP  # else small answers wait for their readers' acknowledgements
    with pytest.raises(UsageError, match="cannot listen") as caught:
        listen("127.0.0.1", listener.getsockname()[1])
    assert "--port" in caught.value.hint
    listener.close()
    with pytest.raises(UsageError, match="no address"):
        listen("no.such.host.invalid", 0)


PROGRAM = """
import sys, time
from blockscale.engine.engine import Engine
from blockscale.engine.options import EngineOptions
from blockscale.engine.vocabulary import read_vocabulary
from blockscale.errors import BlockscaleError
from blockscale.server.limits import Limits
from blockscale.server.run import ServerOptions, listen, serve
from tests.engine.fake_decoder import VOCAB_SIZE, FakeModel
from tests.server.running import letters

def slow(batch):
    time.sleep(0.05)
    if 66 in batch.token_ids.tolist() and batch.max_query == 3:  # the prompt BBB
        raise SystemExit("the engine's thread dies")

tokenizer = letters(size=VOCAB_SIZE)
vocabulary = read_vocabulary(tokenizer)
engine = Engine(FakeModel(fails=slow), EngineOptions(num_pages=16), vocabulary=vocabulary)
options = ServerOptions(("tiny",), limits=Limits(drain_seconds=float(sys.argv[1])))
try:
    serve(engine, tokenizer, vocabulary, listen("127.0.0.1", 0), options, lambda text: print(text, flush=True))
except BlockscaleError as error:
    sys.exit(error.exit_code)
"""


def start(drain_s: float) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(drain_s)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout
    line = process.stdout.readline()
    assert "http://127.0.0.1:" in line
    return process, line.split()[-1]


@pytest.mark.parametrize(("drain_s", "num", "is_whole"), [(20.0, 12, True), (0.2, 100, False)])
def test_a_server_that_is_told_to_end(drain_s: float, num: int, is_whole: bool) -> None:
    process, url = start(drain_s)
    body = {"model": "tiny", "prompt": "AAAA", "max_tokens": num, "temperature": 0, "stream": True}
    with httpx.stream("POST", url + TEXT, json=body, timeout=20) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        events = [next(lines)]
        process.send_signal(signal.SIGTERM)
        events += lines
    if is_whole:
        assert events.pop() == "[DONE]"
        assert "".join(json.loads(e)["choices"][0]["text"] for e in events) == expected("AAAA", num)
    else:
        assert json.loads(events[-1])["error"]["code"] == "shutting_down"
    assert process.wait(20) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(url + "/health")


def test_a_server_whose_engine_dies() -> None:
    process, url = start(1.0)
    began = time.monotonic()
    response = httpx.post(url + TEXT, json={"model": "tiny", "prompt": "BBB"}, timeout=20)
    assert response.status_code == 503
    assert process.wait(20) == 1
    assert time.monotonic() - began < 15
