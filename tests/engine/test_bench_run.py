"""Several loads through the real engine, with a model that is a hash. Needs nothing."""

import pytest

from blockscale.engine.bench.figures import Subject
from blockscale.engine.bench.run import bench_model, workloads
from blockscale.errors import UsageError

from .fake_decoder import FakeModel


def test_a_model_under_several_loads() -> None:
    """The real engine, with a model that is a hash."""
    subject = Subject("hash", "none", "bf16", "cpu", 1e9, lambda sequences, context: 1e6)
    loads = workloads(12, 5, concurrency=[1, 3], rates=[200.0], num_requests=4)
    told: list[tuple[int, int]] = []
    rows = bench_model(FakeModel(), subject, loads, progress=lambda _, done, total: told.append((done, total)))
    assert [r.load for r in rows] == ["1 at once", "3 at once", "200 a second"]
    for figures in rows:
        assert (figures.num_requests, figures.num_failed) == (4, 0)
        assert figures.ttft_ms.p50 > 0
        assert figures.itl_ms is not None
        assert figures.tokens_per_s > 0
        assert figures.joules_per_token is None
    assert rows[0].sequences == 1.0
    assert rows[0].step_ms is not None
    assert rows[0].gb_per_s is not None
    assert rows[0].read_share == pytest.approx(rows[0].gb_per_s)
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_requests_that_are_longer_than_the_context_are_refused_at_once() -> None:
    subject = Subject("hash", "none", "bf16", "cpu", 1e9, lambda sequences, context: 1e6)
    with pytest.raises(UsageError, match="700 tokens of prompt and output: the model's context is 512"):
        bench_model(FakeModel(), subject, workloads(600, 100, [1], [], None))


def test_how_many_requests_a_load_has() -> None:
    assert [w.num_requests for w in workloads(1, 1, [1, 64], [2.0], None)] == [4, 128, 60]
    assert [w.num_requests for w in workloads(1, 1, [64], [], 7)] == [7]
    with pytest.raises(UsageError, match="no load"):
        workloads(1, 1, [], [], None)
