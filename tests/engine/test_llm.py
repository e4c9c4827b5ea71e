"""Whole outputs."""

import pytest

from blockscale.engine.llm import generate
from blockscale.engine.request import FinishReason, Usage
from blockscale.engine.sampling import Sampling
from blockscale.errors import EngineError, UsageError
from engine.fake_decoder import greedy
from engine.test_engine import LETTERS, make, prompt


def test_outputs_in_order_of_the_prompts() -> None:
    engine = make(vocabulary=LETTERS)
    prompts = [prompt(i, 3 + i) for i in range(6)]
    samplings = [Sampling(max_tokens=2 + 3 * (i % 3), logprobs=0 if i == 2 else None) for i in range(6)]
    written: dict[int, str] = {}
    outputs = generate(engine, prompts, samplings, lambda i, text: written.update({i: written.get(i, "") + text}))
    for i, output in enumerate(outputs):
        assert list(output.token_ids) == greedy(prompts[i], samplings[i].max_tokens)
        assert output.text == written.get(i, "") == "".join(LETTERS.piece(t).decode() for t in output.token_ids)
        assert output.finish_reason is FinishReason.LENGTH
        assert output.usage == Usage(3 + i, samplings[i].max_tokens, 0)
        assert len(output.logprobs) == (samplings[i].max_tokens if i == 2 else 0)
    assert generate(engine, [], Sampling()) == []


def test_what_fails_leaves_nothing_behind() -> None:
    def fails(batch) -> None:
        if len(batch.token_ids) > 10:
            raise RuntimeError("too large")

    engine = make(fails, vocabulary=LETTERS)
    with pytest.raises(EngineError, match="RuntimeError: too large"):
        generate(engine, [prompt(0, 5), prompt(1, 30)], Sampling(max_tokens=5))

    def closed(i: int, text: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        generate(engine, [[40, 41]], Sampling(max_tokens=30), closed)
    with pytest.raises(UsageError, match="empty"):
        generate(engine, [[1], []], Sampling())
    with pytest.raises(UsageError, match="2 prompts, 1 samplings"):
        generate(engine, [[1], [2]], [Sampling()])
    assert not engine.has_work
    engine.check_integrity()
    assert engine.stats().pages.held == 0
    engine.submit([1])
    with pytest.raises(UsageError, match="at work for others"):
        generate(engine, [[1]], Sampling())
