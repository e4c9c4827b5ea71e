"""Vectors of prompts: the same whatever runs beside them, in pieces, after giving way, and with prefixes cached."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockscale.engine.engine import Engine
from blockscale.engine.options import EngineOptions
from blockscale.engine.request import FinishReason
from blockscale.engine.sampling import Sampling
from blockscale.errors import EngineError, UsageError
from blockscale.models.pooling import Pooling
from engine.fake_decoder import VOCAB_SIZE, FakeModel, greedy, running_hashes


def make(context: int = 512, **options: int) -> Engine:
    return Engine(FakeModel(context), EngineOptions(**{"num_pages": 12, "max_running": 4, "seed": 1} | options))


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected(tokens: list[int], pooling: Pooling) -> float:
    """The fake model's hidden states are whole numbers, whose sums fp64 holds exactly."""
    hashes = running_hashes(tokens)
    return {Pooling.LAST: hashes[-1], Pooling.FIRST: hashes[0], Pooling.MEAN: sum(hashes) / len(hashes)}[pooling]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 90), st.sampled_from([*Pooling, None])), min_size=1, max_size=7),
    st.integers(6, 12),
    st.integers(4, 40),
    st.booleans(),
)
def test_vectors_do_not_depend_on_what_else_runs(
    asked: list[tuple[int, Pooling | None]], num_pages: int, max_step_tokens: int, share: bool
) -> None:
    engine = make(num_pages=num_pages, max_step_tokens=max_step_tokens, run_ahead=share)
    prompts = [prompt(0 if share else i, length) for i, (length, _) in enumerate(asked)]
    for i, ((_, pooling), tokens) in enumerate(zip(asked, prompts, strict=True)):
        num = min(6, engine.context - len(tokens))
        engine.submit(tokens, Sampling(max_tokens=num) if pooling is None else Sampling(pooling=pooling), str(i))
    found: dict[int, list[int]] = {i: [] for i in range(len(asked))}
    vectors = {}
    while engine.has_work:
        for event in engine.step():
            found[int(event.request_id)] += event.token_ids
            if event.vector is not None:
                assert event.finish_reason is FinishReason.STOP
                assert event.usage
                assert (event.usage.prompt_tokens, event.usage.output_tokens) == (asked[int(event.request_id)][0], 0)
                vectors[int(event.request_id)] = event.vector
        engine.check_integrity()
    for i, ((_, pooling), tokens) in enumerate(zip(asked, prompts, strict=True)):
        if pooling is None:
            assert found[i] == greedy(tokens, min(6, engine.context - len(tokens)))
        else:
            assert vectors[i] == (expected(tokens, pooling),)
            assert not found[i]
    assert engine.stats().pages.held == 0


def test_a_prompt_that_gave_way_counts_each_token_once() -> None:
    engine = make(num_pages=5, max_step_tokens=16)
    engine.submit(prompt(1, 14), Sampling(max_tokens=40), "text")
    engine.submit(prompt(2, 60), Sampling(pooling=Pooling.MEAN), "vector")
    vectors = [event.vector for _ in range(200) if engine.has_work for event in engine.step() if event.vector]
    assert vectors == [(expected(prompt(2, 60), Pooling.MEAN),)]
    assert engine.stats().num_preempted > 0


def test_the_whole_context_is_embedded_and_no_more() -> None:
    engine = make(context=32)
    engine.submit(prompt(1, 32), Sampling(pooling=Pooling.LAST))
    (event,) = engine.step()
    assert event.vector == (expected(prompt(1, 32), Pooling.LAST),)
    with pytest.raises(UsageError, match="33 tokens"):
        engine.submit(prompt(1, 33), Sampling(pooling=Pooling.LAST))


def test_only_the_last_token_can_be_found_with_the_cache_s_help() -> None:
    engine = make()
    for pooling, cached in ((Pooling.LAST, 0), (Pooling.LAST, 32), (Pooling.MEAN, 0), (Pooling.FIRST, 0)):
        engine.submit(prompt(1, 40), Sampling(pooling=pooling))
        (event,) = engine.step()
        assert event.usage
        assert event.usage.cached_tokens == cached
        assert event.vector == (expected(prompt(1, 40), pooling),)


def test_nothing_is_drawn_beside_a_vector() -> None:
    with pytest.raises(UsageError, match="logprobs beside pooling"):
        Sampling(pooling=Pooling.LAST, logprobs=1)


class _NaN(FakeModel):
    def forward(self, batch, caches):  # type: ignore[no-untyped-def]
        return super().forward(batch, caches) * float("nan")


def test_a_vector_that_is_not_finite_is_an_error() -> None:
    engine = Engine(_NaN(), EngineOptions(num_pages=4))
    engine.submit([1, 2], Sampling(pooling=Pooling.MEAN))
    (event,) = engine.step()
    assert isinstance(event.error, EngineError)
    assert event.vector is None
