"""The canary: what it scores, what it compares, when it warns. Needs nothing."""

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from blockscale.engine.request import TokenLogprob
from blockscale.engine.vocabulary import read_vocabulary
from blockscale.errors import CheckpointError, UsageError
from blockscale.server.canary import (
    Bounds,
    Canary,
    Numbers,
    compare,
    divergence,
    read_reference,
    score,
    write_reference,
)
from blockscale.server.service import Service
from tests.server.fake_engine import FakeEngine
from tests.server.running import letters, make_service, read_metrics

TEXT = "A fixed text, long enough for several windows. " * 10


def service(context: int = 100) -> Service:
    tokenizer = letters()
    return make_service(FakeEngine(read_vocabulary(tokenizer)), tokenizer, context=context)


def entry(shares: dict[int, float], token: int) -> TokenLogprob:
    top = tuple((t, math.log(p)) for t, p in shares.items())
    return TokenLogprob(token, math.log(shares[token]), top)


def test_every_token_but_the_first_of_a_window_is_scored() -> None:
    numbers = asyncio.run(score(service(context=100), TEXT))
    assert numbers.perplexity == pytest.approx(2.0)  # the fake engine gives every token a half
    num_windows = math.ceil(len(TEXT) / 99)
    assert numbers.scored
    assert len(numbers.scored) == len(TEXT) - num_windows
    assert [s.token_id for s in numbers.scored[:3]] == [ord(c) for c in TEXT[1:4]]


def test_a_text_too_short() -> None:
    with pytest.raises(UsageError, match="nothing to score"):
        asyncio.run(score(service(), "x"))


def test_users_metrics_do_not_count_it() -> None:
    it = service()
    asyncio.run(score(it, TEXT))
    assert "blockscale_prompt_tokens_total 0.0" in it.metrics.text().decode()


def test_divergence_by_hand() -> None:
    reference = entry({1: 0.5, 2: 0.25, 3: 0.125}, 1)
    now = entry({1: 0.25, 2: 0.25, 9: 0.25}, 1)
    # 3 and 9 are named by one side alone: they go into the rest, 0.25 against 0.5
    expected = 0.5 * math.log(2) + 0 + 0.25 * math.log(0.5)
    assert divergence(reference, now) == pytest.approx(expected)
    assert divergence(reference, reference) == 0


def test_divergence_is_never_above_the_whole() -> None:
    p = {0: 0.4, 1: 0.3, 2: 0.2, 3: 0.1}
    q = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}
    whole = sum(p[t] * math.log(p[t] / q[t]) for t in p)
    for kept in range(1, 5):
        part = divergence(entry(dict(list(p.items())[:kept]), 0), entry(dict(list(q.items())[:kept]), 0))
        assert part <= whole + 1e-12
    assert divergence(entry(p, 0), entry(q, 0)) == pytest.approx(whole)


def test_reference_goes_to_disk_and_back(tmp_path: Path) -> None:
    numbers = asyncio.run(score(service(), TEXT))
    path = tmp_path / "numbers.json"
    write_reference(path, numbers, "tiny")
    assert read_reference(path) == numbers
    path.write_text(json.dumps({"perplexity": 2.0}))
    with pytest.raises(CheckpointError, match="not a canary's reference"):
        read_reference(path)
    with pytest.raises(UsageError, match="no such file"):
        read_reference(tmp_path / "other.json")


def test_warnings() -> None:
    numbers = Numbers(10.0, "digest", (entry({1: 0.5}, 1),))
    bounds = Bounds(max_ratio=1.1, max_kl=0.1, max_movement=0.01)
    assert compare(numbers, numbers, numbers, bounds).warnings == ()
    assert compare(numbers, None, None, bounds).kl is None
    worse = Numbers(12.0, "digest", (entry({1: 0.1}, 1),))
    reading = compare(worse, numbers, numbers, bounds)
    assert reading.ratio == pytest.approx(1.2)
    assert [w.split(" ")[1] for w in reading.warnings] == ["perplexity", "divergence", "perplexity"]
    broken = compare(replace(worse, perplexity=math.nan), numbers, numbers, bounds)
    assert len(broken.warnings) == 4
    with pytest.raises(UsageError, match="another text"):
        compare(replace(numbers, tokens="other"), numbers, None, bounds)


def test_it_exports_and_warns_of_drift() -> None:
    it = service()
    warnings: list[str] = []

    async def run() -> None:
        reference = await score(it, TEXT)
        canary = Canary(it, TEXT, reference, every_s=0.01, bounds=Bounds(), warn=warnings.append)
        await canary.check()
        assert "blockscale_canary_drift 0.0" in it.metrics.text().decode()
        assert "blockscale_canary_kl_nats 0.0" in it.metrics.text().decode()
        it.engine.share = 0.4  # type: ignore[attr-defined]
        task = asyncio.create_task(canary.run())
        while not warnings:
            await asyncio.sleep(0.01)
        task.cancel()
        figures = read_metrics(it.metrics.text().decode())
        assert figures["blockscale_canary_perplexity"] == pytest.approx(2.5)
        assert figures["blockscale_canary_perplexity_ratio"] == pytest.approx(1.25)
        assert figures["blockscale_canary_drift"] == 1

    asyncio.run(run())
    assert any("moved by 25 %" in warning for warning in warnings)


def test_it_waits_for_users_but_not_for_ever() -> None:
    it = service()

    async def run() -> None:
        with it.traffic.admitted(1):
            canary = Canary(it, TEXT, None, every_s=0.2, bounds=Bounds(), warn=lambda _: None)
            task = asyncio.create_task(canary.run())
            await asyncio.sleep(0.3)
            assert canary.last is None
            while canary.last is None:
                await asyncio.sleep(0.01)
            task.cancel()

    asyncio.run(asyncio.wait_for(run(), 10))
