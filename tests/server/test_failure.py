"""The engine fails under load: requests end with 503, the others go on, and a lost GPU ends the server."""

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch

from blockscale.engine.engine import Engine
from blockscale.engine.options import EngineOptions
from blockscale.engine.vocabulary import read_vocabulary
from blockscale.engine.worker import EngineThread
from blockscale.models.batch import Batch
from blockscale.server.limits import Limits
from tests.engine.fake_decoder import VOCAB_SIZE, FakeModel, greedy
from tests.server.fake_engine import FakeEngine
from tests.server.running import Running, check_nothing_is_left, letters, make_service, over, running, wait_for

ROOT = Path(__file__).parents[2]
TEXT = "/v1/completions"
VICTIM = [7, 7, 7]
TOKENIZER = letters(size=VOCAB_SIZE)


def make(model: FakeModel, **options: int) -> Engine:
    chosen = EngineOptions(**{"num_pages": 24, "max_running": 4, "max_context": 128} | options)
    return Engine(model, chosen, vocabulary=read_vocabulary(TOKENIZER))


def ask(server: Running, prompt: list[int], num: int = 8, *, stream: bool = False) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": num, "temperature": 0, "skip_special_tokens": False}
    return server.post(TEXT, **body, stream=stream)


def text_of(prompt: list[int], num: int) -> str:
    return "".join(map(chr, greedy(prompt, num)))


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError])
@pytest.mark.parametrize("length", [3, 6])  # of the victim's sequence when it fails: its prompt, or in its output
def test_out_of_memory_fails_its_request_alone(kind: type[Exception], length: int) -> None:
    def fails(batch: Batch) -> None:
        if batch.token_ids[0] in (*VICTIM, *greedy(VICTIM, length)) and batch.lengths.tolist()[-1] == length:
            raise kind("CUDA out of memory. Tried to allocate 2 GiB")

    engine = make(FakeModel(fails=fails))
    with over(engine, TOKENIZER) as server:
        whole = ask(server, VICTIM)
        assert whole.status_code == 503
        assert whole.headers["retry-after"]
        assert "out of memory" in whole.json()["error"]["message"]
        streamed = ask(server, VICTIM, stream=True)
        if length == 3:
            assert streamed.status_code == 503
        else:  # it had begun
            lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
            assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == text_of(VICTIM, 3)
            assert "out of memory" in json.loads(lines[-1])["error"]["message"]
        assert ask(server, list(range(20, 40))).json()["choices"][0]["text"] == text_of(list(range(20, 40)), 8)
        assert server.get("/health").status_code == 200
        check_nothing_is_left(server, engine)
        assert engine.stats().num_failed == 2


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (RuntimeError, "CUDA error: an illegal memory access was encountered"),
        (torch.AcceleratorError, "CUDA error: device-side assert triggered"),
        (RuntimeError, "Triton Error [CUDA]: misaligned address"),
    ],
)
def test_a_lost_gpu_fails_all_and_says_so(kind: type[Exception], text: str) -> None:
    def fails(batch: Batch) -> None:
        if batch.lengths.max() > 5:
            raise kind(text)

    engine = make(FakeModel(fails=fails))
    with over(engine, TOKENIZER) as server:
        worker = server.service.engine
        assert isinstance(worker, EngineThread)
        response = ask(server, VICTIM)
        assert response.status_code == 503
        assert "the GPU failed" in response.json()["error"]["message"]
        wait_for(lambda: not worker.is_alive)
        health = server.get("/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_dead")
        assert ask(server, [1]).status_code == 503
        assert "the GPU failed" in str(worker.failure)
        assert not engine.has_work


PROGRAM = """
import sys
from blockscale.engine.engine import Engine
from blockscale.engine.options import EngineOptions
from blockscale.engine.vocabulary import read_vocabulary
from blockscale.errors import BlockscaleError
from blockscale.server.run import ServerOptions, listen, serve
from tests.engine.fake_decoder import VOCAB_SIZE, FakeModel
from tests.server.running import letters

def fails(batch):
    if batch.lengths.max() > 40:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

tokenizer = letters(size=VOCAB_SIZE)
vocabulary = read_vocabulary(tokenizer)
engine = Engine(FakeModel(fails=fails), EngineOptions(num_pages=16), vocabulary=vocabulary)
try:
    options, listener = ServerOptions(("tiny",)), listen("127.0.0.1", 0)
    serve(engine, tokenizer, vocabulary, listener, options, lambda text: print(text, flush=True))
except BlockscaleError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def test_a_server_without_its_gpu_ends() -> None:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout
        assert process.stderr
        url = process.stdout.readline().split()[-1]
        body = {"model": "tiny", "prompt": [1], "max_tokens": 60, "temperature": 0, "stream": True}
        with httpx.stream("POST", url + TEXT, json=body, timeout=20) as response:
            last = [line for line in response.iter_lines() if line][-1]
        assert "the GPU failed" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert process.wait(20) == 1
        said = process.stderr.read()
    assert "the engine ended: the GPU failed: CUDA error" in said
    assert "Traceback" not in said


def test_a_full_engine() -> None:
    def slow(batch: Batch) -> None:
        time.sleep(0.02)

    engine = make(FakeModel(fails=slow), max_running=1, max_waiting=1)
    with over(engine, TOKENIZER) as server:
        body = {"model": "tiny", "max_tokens": 40, "temperature": 0, "prompt": [[1], [2], [3], [4]]}
        response = server.post(TEXT, **body)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["type"] == "rate_limit_error"
        check_nothing_is_left(server, engine)
        assert ask(server, [1]).status_code == 200


def test_numbers_that_are_not_finite() -> None:
    class NaN(FakeModel):
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().logits(hidden) * float("nan")

    with over(make(NaN()), TOKENIZER) as server:
        response = ask(server, [1])
        assert response.status_code == 503
        assert "not finite" in response.json()["error"]["message"]


def test_a_step_that_does_not_end() -> None:
    engine = FakeEngine(read_vocabulary(letters()))
    with running(make_service(engine, letters(), limits=Limits(stuck_seconds=5))) as server:
        assert server.get("/health").status_code == 200
        engine.busy_s = 6.0
        health = server.get("/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_stuck")
