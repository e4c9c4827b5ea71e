"""Many requests at once, as `benchmarks/server_load.py` sends them: every answer is the one that its prompt gets alone,
every stream ends, and nothing is left behind."""

import argparse
import asyncio
import gc
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.server_load import Kind, Load, left_behind, make_asks, make_prompts, measure
from blockscale.engine.engine import Engine
from blockscale.engine.options import EngineOptions
from blockscale.engine.request import Request
from blockscale.engine.vocabulary import read_vocabulary
from blockscale.engine.worker import EngineThread
from blockscale.models.load import load_decoder
from blockscale.server.page import page_router
from blockscale.server.run import ServerOptions, make_service
from tests.engine.fake_decoder import VOCAB_SIZE, FakeModel, greedy
from tests.server.running import letters, running

CONTEXT = 160


def test_a_load_is_made_of_what_it_says() -> None:
    counts = Counter(ask.kind for ask in make_asks(1000, 60, seed=2))
    assert counts[Kind.CANCELLED] == 100
    assert counts[Kind.MALFORMED] == 10
    assert counts[Kind.STREAM] + counts[Kind.WHOLE] == 890
    prompts = make_prompts(60, 97, 80, 40, seed=1)
    assert {len(p.token_ids) for p in prompts} > {1, 80}
    assert max(p.max_tokens for p in prompts) > 30 > 2 > min(p.max_tokens for p in prompts)
    beginnings = Counter(p.token_ids[:16] for p in prompts if len(p.token_ids) >= 16)
    assert max(beginnings.values()) > 1  # a page to share


def test_many_requests_leave_nothing_behind() -> None:
    tokenizer = letters(size=VOCAB_SIZE)
    vocabulary = read_vocabulary(tokenizer)
    options = EngineOptions(num_pages=12, max_running=8, max_step_tokens=48, max_context=CONTEXT)
    engine = Engine(FakeModel(), options, vocabulary=vocabulary)
    worker = EngineThread(engine)
    service = make_service(worker, engine, tokenizer, vocabulary, ServerOptions(("tiny",)))
    prompts = make_prompts(25, VOCAB_SIZE, 70, 40, seed=1)
    asks = make_asks(150, len(prompts), seed=2)

    async def drive(url: str) -> Load:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            load = Load(client, "tiny", CONTEXT, prompts)
            alone = await load.answer_alone()
            for prompt, answer in zip(prompts, alone, strict=True):
                known = greedy(prompt.token_ids, prompt.max_tokens)
                assert (answer.text, answer.num_tokens) == ("".join(map(chr, known)), len(known))
            await load.run(asks, concurrency=12)
            assert await left_behind(client) == []
        return load

    with running(service, routers=[page_router(service)]) as server:
        load = asyncio.run(drive(server.url))
        assert load.wrong == []
        assert sum(load.counts.values()) == len(asks)
        stats = engine.stats()
        assert stats.num_preempted > 0
        assert stats.num_cached_tokens > 0
        assert stats.num_aborted > 0
        assert stats.num_failed == 0
        assert service.traffic.num_sequences == 0
        engine.check_integrity()
        tasks: list[str] = []
        looked = threading.Event()

        def look() -> None:
            tasks.extend(str(task.get_coro()) for task in asyncio.all_tasks(server.loop))
            looked.set()

        server.call(look)
        assert looked.wait(10)
        assert [task for task in tasks if "blockscale" in task] == []
        gc.collect()
        held = [o for o in gc.get_objects() if type(o) is Request]
        assert len(held) <= 1  # the last one may stand in a frame that has not returned
    asyncio.run(worker.close())


class _Lies(FakeModel):
    """Whose answers are others once `is_lying`."""

    is_lying = False

    def logits(self, hidden: Any) -> Any:
        logits = super().logits(hidden)
        return logits.flip(-1) if self.is_lying else logits


def test_a_wrong_answer_is_found() -> None:
    tokenizer = letters(size=VOCAB_SIZE)
    vocabulary = read_vocabulary(tokenizer)
    model = _Lies()
    engine = Engine(model, EngineOptions(num_pages=24, max_context=CONTEXT), vocabulary=vocabulary)
    worker = EngineThread(engine)
    service = make_service(worker, engine, tokenizer, vocabulary, ServerOptions(("tiny",)))
    prompts = make_prompts(2, VOCAB_SIZE, 10, 8, seed=1)

    async def drive(url: str) -> Load:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            load = Load(client, "tiny", CONTEXT, prompts)
            await load.answer_alone()
            model.is_lying = True
            await load.run(make_asks(12, 2, seed=1) * 2, concurrency=2)
        return load

    with running(service, routers=[page_router(service)]) as server:
        assert asyncio.run(drive(server.url)).wrong != []
    asyncio.run(worker.close())


@pytest.mark.slow
def test_a_thousand_requests_to_a_quantized_model(golden_checkpoint: Callable[[str], Path]) -> None:
    """NVFP4 weights and an FP8 cache; server and client share the process, whose memory is measured."""
    tokenizer = letters(size=256)
    vocabulary = read_vocabulary(tokenizer)
    model = load_decoder(golden_checkpoint("modelopt_llama_nvfp4_fp8kv"))
    engine = Engine(model, EngineOptions(num_pages=16, max_running=16, max_step_tokens=256), vocabulary=vocabulary)
    worker = EngineThread(engine)
    service = make_service(worker, engine, tokenizer, vocabulary, ServerOptions(("tiny",)))
    with running(service, routers=[page_router(service)]) as server:
        args = argparse.Namespace(requests=1000, concurrency=24, rounds=5)
        figures = asyncio.run(measure(server.url, os.getpid(), args))
        engine.check_integrity()
    asyncio.run(worker.close())
    assert figures["wrong"] == []
    assert figures["engine"]["failed"] == 0
    assert figures["engine"]["preempted"] > 0
    assert sum(figures["requests"].values()) == 1000
