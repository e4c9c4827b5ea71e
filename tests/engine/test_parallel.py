"""An engine whose model is divided among processes: its answers, and what becomes of all when one of them ends."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from blockscale.engine.bench.random_model import draw_weights, random_config, write_hollow
from blockscale.engine.engine import Engine
from blockscale.engine.llm import generate
from blockscale.engine.options import EngineOptions
from blockscale.engine.orders import Logits, Run, as_batch, as_run
from blockscale.engine.parallel import ParallelModel, load_parallel
from blockscale.engine.request import FinishReason
from blockscale.engine.sampling import Sampling
from blockscale.engine.worker import EngineThread
from blockscale.errors import EngineError, RankError, UsageError
from blockscale.llm import LLM
from blockscale.models.batch import Batch
from blockscale.models.load import load_decoder

ROOT = Path(__file__).parents[2]
OPTIONS = EngineOptions(num_pages=24, max_running=4, max_step_tokens=16, seed=1)
PROMPTS = ([5, 6, 7, 8, 9], [1, 2, 3], list(range(40)), [77] * 17)
GREEDY = Sampling(max_tokens=12, ignore_eos=True)
DRAWN = Sampling(max_tokens=8, temperature=1.0, top_p=0.9, seed=3, logprobs=2, ignore_eos=True)
SECONDS = 20.0  # for what takes a fraction of one on an idle machine


@pytest.fixture(scope="module")
def path() -> Path:
    return ROOT / "tests/golden/checkpoints/modelopt_llama_nvfp4"


@pytest.fixture
def model(path: Path) -> Iterator[ParallelModel]:
    loaded = load_parallel(path, 2, device="cpu")
    yield loaded
    loaded.close()


def is_there(process_id: int) -> bool:
    """A process that has ended and that nobody has waited for counts as gone."""
    try:
        return (Path("/proc") / str(process_id) / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(is_so: Callable[[], bool]) -> bool:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if is_so():
            return True
        time.sleep(0.02)
    return is_so()


def test_two_ranks_answer_as_one(path: Path, with_tokenizer: Callable[[str], Path]) -> None:
    """Prompts in pieces beside decodes, prefixes found again, draws with a seed; then a process is killed."""
    alone = Engine(load_decoder(path), OPTIONS)
    engine = LLM(with_tokenizer(path.name), device="cpu", tensor_parallel=2, options=OPTIONS).engine
    assert engine is not None
    model = engine.model
    assert isinstance(model, ParallelModel)
    for sampling in (GREEDY, DRAWN, GREEDY):
        expected, found = generate(alone, PROMPTS, sampling), generate(engine, PROMPTS, sampling)
        assert [out.token_ids for out in found] == [out.token_ids for out in expected]
        assert [out.usage for out in found] == [out.usage for out in expected]
    assert engine.stats().num_cached_tokens > 0
    engine.check_integrity()
    held = model.decoder.page_bytes(OPTIONS.page_size)
    assert held == load_decoder(path).page_bytes(OPTIONS.page_size) // 2

    (process_id,) = model.ranks.process_ids
    os.kill(process_id, signal.SIGKILL)
    name = engine.submit([1, 2, 3], GREEDY)
    (event,) = engine.step()
    assert (event.request_id, event.finish_reason) == (name, FinishReason.ERROR)
    assert isinstance(event.error, RankError)
    assert "rank 1 ended, with exit code -9" in str(event.error)
    assert event.error.hint
    assert engine.lost is event.error
    engine.check_integrity()
    assert not is_there(process_id)
    with pytest.raises(RankError):
        engine.submit([1], GREEDY)


def test_a_process_that_ends_in_the_middle_of_a_step(model: ParallelModel) -> None:
    """Rank 0 waits for it, and does not for long; the thread that runs the engine ends, and says why."""
    (process_id,) = model.ranks.process_ids

    async def use() -> BaseException | None:
        worker = EngineThread(Engine(model, OPTIONS))
        os.kill(process_id, signal.SIGSTOP)  # it is there, and does not answer
        threading.Timer(0.5, os.kill, (process_id, signal.SIGKILL)).start()
        error: BaseException | None = None
        try:
            async for event in worker.submit([1, 2, 3], GREEDY):
                error = event.error
        finally:
            assert await asyncio.to_thread(wait_until, lambda: worker.failure is not None)
            await worker.close()
        return error

    begin = time.monotonic()
    error = asyncio.run(use())
    assert isinstance(error, RankError)
    assert "rank 1 ended, with exit code -9" in str(error)
    assert 0.4 < time.monotonic() - begin < SECONDS
    assert not is_there(process_id)


def test_what_fails_in_a_process_is_said(model: ParallelModel) -> None:
    """Its own words, not those of who misses it."""
    engine = Engine(model, OPTIONS)
    model.ranks.tell(Logits(-1))  # what it cannot do
    engine.submit([1, 2, 3], GREEDY)
    (event,) = engine.step()
    assert isinstance(event.error, RankError)
    assert "rank 1: RuntimeError: " in str(event.error)
    assert "negative dimension -1" in str(event.error)
    assert wait_until(lambda: not any(map(is_there, model.ranks.process_ids)))


def test_random_weights_and_closing(tmp_path: Path) -> None:
    """Each rank draws its part; then the processes end."""
    write_hollow(tmp_path, random_config("tiny"))
    model = load_parallel(tmp_path, 2, device="cpu")
    stored = (tmp_path / "model.safetensors").stat().st_size
    own, others = draw_weights(model.decoder), model.draw(0)
    assert own == others
    assert 0.95 * stored < own + others < 1.1 * stored
    engine = Engine(model, OPTIONS)
    (output,) = generate(engine, PROMPTS[:1], GREEDY)
    assert len(set(output.token_ids)) > 1, "the weights are zeros"
    engine.close()
    engine.close()
    assert not any(map(is_there, model.ranks.process_ids))
    with pytest.raises(EngineError, match="closed"):
        engine.submit([1], GREEDY)


_USER = """
import sys
from pathlib import Path
import torch
from blockscale.engine.engine import Engine
from blockscale.engine.llm import generate
from blockscale.engine.options import EngineOptions
from blockscale.engine.parallel import load_parallel
from blockscale.engine.sampling import Sampling
torch.set_num_threads(1)
model = load_parallel(Path({path!r}), 2, device="cpu")
engine = Engine(model, EngineOptions(num_pages=24))
print(*model.ranks.process_ids, flush=True)
while True:
    generate(engine, [[1, 2, 3]], Sampling(max_tokens=64, ignore_eos=True))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left(number: signal.Signals, path: Path, tmp_path: Path) -> None:
    """Nor a folder. Ctrl-C goes to all processes of a terminal's foreground; SIGKILL leaves no time for anything. The
    program has no main guard."""
    user = subprocess.Popen(
        [sys.executable, "-c", _USER.format(path=str(path))],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert user.stdout is not None
        ids = [int(word) for word in user.stdout.readline().split()]
        assert len(ids) == 1, user.stderr and user.stderr.read()
        assert all(map(is_there, ids))
        time.sleep(0.2)
        os.killpg(user.pid, number)
        assert wait_until(lambda: user.poll() is not None)
        assert wait_until(lambda: not any(map(is_there, ids)))
        assert not list(tmp_path.glob("blockscale-ranks-*"))
    finally:
        if user.poll() is None:
            user.kill()
        _, errors = user.communicate()
    assert number is signal.SIGKILL or "KeyboardInterrupt" in errors


def test_what_cannot_be_divided_is_refused_before_a_process_starts(path: Path) -> None:
    with pytest.raises(UsageError, match="4 of the model"):
        load_parallel(path, 3, device="cpu")
    with pytest.raises(UsageError, match="2 devices or more"):
        load_parallel(path, 1, device="cpu")
    with pytest.raises(UsageError, match="tensor_parallel"):
        EngineOptions(tensor_parallel=0)


def test_a_weight_that_one_rank_misses(path: Path, tmp_path: Path) -> None:
    """Loading fails as it does on one device, and leaves no process."""
    import json
    import shutil

    broken = shutil.copytree(path, tmp_path / "model")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] + 1}))
    before = set(os.listdir("/proc"))
    with pytest.raises(Exception, match="the checkpoint has no"):
        load_parallel(broken, 2, device="cpu")
    started = {pid for pid in set(os.listdir("/proc")) - before if pid.isdigit()}
    assert not [pid for pid in started if b"engine.follower" in _command(pid)]


def _command(process_id: str) -> bytes:
    try:
        return (Path("/proc") / process_id / "cmdline").read_bytes()
    except OSError:
        return b""


def test_a_batch_arrives_as_it_was_sent() -> None:
    batch = Batch(*(torch.arange(3, dtype=torch.int64) + i for i in range(6)), 3, False)
    sent = as_run(batch)
    assert isinstance(sent, Run)
    found = as_batch(sent)
    assert all(torch.equal(getattr(found, name), getattr(batch, name)) for name in ("token_ids", "slots", "page_table"))
    assert (found.max_query, found.is_decode) == (3, False)
