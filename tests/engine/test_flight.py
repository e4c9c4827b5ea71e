"""Steps that run ahead of their tokens give what steps that wait for them give."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from blockscale.engine.engine import Engine
from blockscale.engine.flight import can_fly
from blockscale.engine.options import EngineOptions
from blockscale.engine.pages import PagePool
from blockscale.engine.request import Event, FinishReason, Request, State
from blockscale.engine.sampling import Sampling
from blockscale.engine.scheduler import Limits, Scheduler, Work
from blockscale.models.batch import Batch

from .fake_decoder import VOCAB_SIZE, FakeModel, greedy, next_token

OPTIONS = EngineOptions(page_size=16, num_pages=40, max_running=4, max_step_tokens=32, seed=5, run_ahead=True)


def drain(engine: Engine) -> dict[str, list[Event]]:
    events: dict[str, list[Event]] = {}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    engine.check_integrity()
    return events


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def outcome(events: dict[str, list[Event]]) -> dict[str, object]:
    return {name: (tokens_of(own), own[-1].finish_reason, own[-1].usage) for name, own in events.items()}


@pytest.mark.parametrize("num_pages", [40, 9])  # nine: requests give way to one another
@pytest.mark.parametrize("seed", range(6))
def test_the_same_outputs(seed: int, num_pages: int) -> None:
    def play(*, run_ahead: bool) -> dict[str, object]:
        draw = random.Random(seed)
        options = replace(OPTIONS, num_pages=num_pages, run_ahead=run_ahead)
        engine = Engine(FakeModel(context=100), options, end_ids=[7, 11, 13])
        events: dict[str, list[Event]] = {}
        for i in range(14):
            prompt = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 50))]
            max_tokens = draw.randint(1, 30)
            sampling = Sampling(
                max_tokens=max_tokens,
                temperature=draw.choice([0.0, 0.0, 0.8]),
                top_p=draw.choice([1.0, 0.9]),
                top_k=draw.choice([0, 5]),
                logprobs=draw.choice([None, None, None, 2]),
                frequency_penalty=draw.choice([0.0, 0.0, 0.5]),
                min_tokens=draw.choice([0, min(3, max_tokens)]),
                stop_token_ids=draw.choice([(), (3, 4)]),
            )
            engine.submit(prompt, sampling, str(i))
            for _ in range(draw.randint(0, 3)):
                for event in engine.step():
                    events.setdefault(event.request_id, []).append(event)
        for name, own in drain(engine).items():
            events.setdefault(name, []).extend(own)
        assert engine.stats().pages.held == 0
        # what lies in the cache, and so what is found there, depends on when a request came in
        return {name: (found[0], found[1]) for name, found in outcome(events).items()}  # type: ignore[index]

    ahead, waiting = play(run_ahead=True), play(run_ahead=False)
    assert len(ahead) == 14
    assert ahead == waiting


def test_steps_are_launched_before_tokens_are_read() -> None:
    model = FakeModel()
    engine = Engine(model, OPTIONS)
    engine.submit([1, 2, 3], Sampling(max_tokens=6))
    engine.step()  # the prompt
    assert len(model.batches) == 1
    (event,) = engine.step()
    assert len(event.token_ids) == 1
    assert len(model.batches) == 3, "the step after is under way"
    drain(engine)
    assert len(model.batches) == 6, "a step too many"


def test_a_token_too_many_is_dropped() -> None:
    """The end token is seen when the next step is under way."""
    prompt = [5, 6]
    expected = greedy(prompt, 8)
    end = expected[4]
    first = expected.index(end)
    engine = Engine(FakeModel(), OPTIONS, end_ids=[end])
    engine.submit(prompt, Sampling(max_tokens=8), "a")
    events = drain(engine)
    assert tokens_of(events["a"]) == expected[: first + 1]
    assert events["a"][-1].finish_reason is FinishReason.STOP
    engine.submit([9], Sampling(max_tokens=3), "a")  # the same name, while nothing flies any more
    assert tokens_of(drain(engine)["a"]) == greedy([9], 3)


def test_abort_in_flight_and_another_on_its_pages() -> None:
    engine = Engine(FakeModel(context=64), replace(OPTIONS, num_pages=4, max_running=2))
    engine.submit([1] * 20, Sampling(max_tokens=20), "gone")
    for _ in range(4):
        engine.step()
    assert engine.abort("gone")
    engine.submit([2] * 30, Sampling(max_tokens=20), "new")
    events = drain(engine)
    assert [e.finish_reason for e in events["gone"]] == [FinishReason.ABORT]
    assert tokens_of(events["new"]) == greedy([2] * 30, 20)


def test_all_aborted_in_flight() -> None:
    engine = Engine(FakeModel(), OPTIONS)
    engine.submit([1, 2], Sampling(max_tokens=20), "a")
    for _ in range(3):
        engine.step()
    engine.abort("a")
    assert [e.finish_reason for e in engine.step()] == [FinishReason.ABORT]
    assert not engine.has_work
    engine.check_integrity()
    engine.submit([4], Sampling(max_tokens=2), "b")
    assert tokens_of(drain(engine)["b"]) == greedy([4], 2)


@pytest.mark.parametrize("failing", range(1, 6))
def test_a_failing_step_ends_whom_it_fails_for(failing: int) -> None:
    """A batch that holds this sequence fails, whenever it comes: the others go on."""
    bad, good = [40, 41], [50]
    length = len(bad) + failing

    def fails(batch: Batch) -> None:
        rows = zip(batch.lengths.tolist(), batch.page_table[:, 0].tolist(), strict=True)
        if any(n >= length and page == pages[0] for n, page in rows):
            raise RuntimeError("no")

    pages = [-1]
    engine = Engine(FakeModel(fails=fails), OPTIONS)
    engine.submit(bad, Sampling(max_tokens=12), "bad")
    engine.submit(good, Sampling(max_tokens=12), "good")
    events: dict[str, list[Event]] = {}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        request = engine._requests.get("bad")
        if request is not None and request.pages:
            pages[0] = request.pages[0]
    engine.check_integrity()
    assert tokens_of(events["good"]) == greedy(good, 12)
    assert events["bad"][-1].finish_reason is FinishReason.ERROR
    assert tokens_of(events["bad"]) == greedy(bad, 12)[: len(tokens_of(events["bad"]))]
    assert len(tokens_of(events["bad"])) == failing, "tokens that were computed are given"


def test_numbers_that_are_not_finite() -> None:
    class Broken(FakeModel):
        def logits(self, hidden: Tensor) -> Tensor:
            found = super().logits(hidden)
            found[hidden[:, 0] == broken] = torch.nan
            return found

    from .fake_decoder import running_hashes

    prompt = [8, 9]
    text = prompt + greedy(prompt, 3)
    broken = running_hashes(text)[-1]
    engine = Engine(Broken(), OPTIONS)
    engine.submit(prompt, Sampling(max_tokens=10), "a")
    engine.submit([1], Sampling(max_tokens=10), "b")
    events = drain(engine)
    assert tokens_of(events["a"]) == greedy(prompt, 3)
    assert events["a"][-1].finish_reason is FinishReason.ERROR
    assert tokens_of(events["b"]) == greedy([1], 10)


def test_what_is_scheduled_ahead() -> None:
    scheduler = Scheduler(PagePool(4, 16), Limits(2, 32, use_prefix_cache=False))
    requests = [
        Request(str(i), i, [1] * n, n, Sampling(), 0, last, frozenset()) for i, n, last in ((0, 15, 40), (1, 3, 5))
    ]
    for request in requests:
        scheduler.add(request)
    for work in scheduler.schedule():
        scheduler.computed(work, 0)
    for request in requests:
        request.tokens.append(2)
    works = scheduler.schedule()
    assert can_fly(works)
    following = scheduler.ahead(works)
    # the second one's next token is its last; the first one's goes on a page of its own
    assert [(w.request.id, w.begin, w.end) for w in following] == [("0", 16, 17)]
    assert len(requests[0].pages) == 2
    third = Request("2", 2, [1], 1, Sampling(), 0, 9, frozenset())
    scheduler.add(third)
    assert scheduler.ahead(works), "it cannot start: two run"
    scheduler.finish(requests[1])
    assert scheduler.ahead(works) == [], "it can start"
    scheduler.finish(third)
    requests[0].state = State.FINISHED
    assert scheduler.ahead(works) == []


def test_what_cannot_fly() -> None:
    def work(sampling: Sampling, num: int = 1, draft: tuple[int, ...] = ()) -> Work:
        return Work(Request("a", 0, [1, 2], 2, sampling, 0, 9, frozenset()), 2 - num, 2, draft)

    assert can_fly([work(Sampling(temperature=1.0, top_p=0.5, top_k=3, logit_bias=((3, 1.0),)))])
    for other in (
        work(Sampling(), num=2),
        work(Sampling(), draft=(5,)),
        work(Sampling(logprobs=0)),
        work(Sampling(presence_penalty=0.1)),
        work(Sampling(repetition_penalty=1.1)),
    ):
        assert not can_fly([work(Sampling()), other])


def test_the_cpu_waits_by_itself() -> None:
    model = FakeModel()
    engine = Engine(model, replace(OPTIONS, run_ahead=None))
    engine.submit([1], Sampling(max_tokens=3))
    engine.step()
    engine.step()
    assert len(model.batches) == 2
    assert next_token([1]) == greedy([1], 1)[0]
