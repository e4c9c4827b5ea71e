"""What a step consists of, and who gives way."""

import pytest

from blockscale.engine.ngram import NgramIndex
from blockscale.engine.pages import PagePool
from blockscale.engine.request import Request, State
from blockscale.engine.sampling import Sampling
from blockscale.engine.scheduler import Limits, Scheduler, Work
from blockscale.errors import UsageError

SIZE = 4


def make(num_pages: int = 100, max_running: int = 4, max_step_tokens: int = 8, **limits) -> Scheduler:
    return Scheduler(PagePool(num_pages, SIZE), Limits(max_running, max_step_tokens, **limits))


def add(scheduler: Scheduler, arrival: int, tokens: list[int] | int, num: int = 10, ngrams: bool = False) -> Request:
    tokens = [100 * arrival + i for i in range(tokens)] if isinstance(tokens, int) else tokens
    index = NgramIndex(tokens) if ngrams else None
    request = Request(
        str(arrival), arrival, tokens, len(tokens), Sampling(), 0, len(tokens) + num, frozenset(), ngrams=index
    )
    scheduler.add(request)
    return request


def do(scheduler: Scheduler, num_accepted: int = 0) -> list[tuple[str, int, int]]:
    """Computes a step, whose samples are all token 7. (id, begin, end) of its works."""
    works = scheduler.schedule()
    for work in works:
        if work.is_sampled:
            work.request.tokens += [*work.draft[:num_accepted], 7]
        scheduler.computed(work, min(num_accepted, len(work.draft)))
    scheduler.check_integrity()
    return [(work.request.id, work.begin, work.end) for work in works]


def test_prompts_share_the_budget_in_order_of_arrival_and_decodes_never_wait() -> None:
    scheduler = make()
    for arrival, length in enumerate((5, 14, 3)):
        add(scheduler, arrival, length)
    assert do(scheduler) == [("0", 0, 5), ("1", 0, 3)]
    assert do(scheduler) == [("0", 5, 6), ("1", 3, 10)]
    assert do(scheduler) == [("0", 6, 7), ("1", 10, 14), ("2", 0, 3)]
    assert do(scheduler) == [("0", 7, 8), ("1", 14, 15), ("2", 3, 4)]


def test_a_long_prompt_holds_up_nobody_who_decodes() -> None:
    scheduler = make(max_running=3, max_step_tokens=3)
    add(scheduler, 0, 50)
    add(scheduler, 1, 1)
    for _ in range(17):
        do(scheduler)
    ids = [{name for name, _, _ in do(scheduler)} for _ in range(5)]
    assert ids == [{"0", "1"}] * 5


def test_no_more_run_than_may() -> None:
    scheduler = make(max_running=2)
    requests = [add(scheduler, i, 1) for i in range(3)]
    assert [name for name, _, _ in do(scheduler)] == ["0", "1"]
    scheduler.finish(requests[0])
    assert requests[0].state is State.FINISHED
    assert [name for name, _, _ in do(scheduler)] == ["1", "2"]


def test_the_youngest_gives_way_and_comes_back_with_its_tokens() -> None:
    scheduler = make(num_pages=4)
    old, young = add(scheduler, 0, 4, num=12), add(scheduler, 1, 4, num=12)
    assert do(scheduler) == [("0", 0, 4), ("1", 0, 4)]
    for i in range(4):  # each has a second page
        assert do(scheduler) == [("0", 4 + i, 5 + i), ("1", 4 + i, 5 + i)]
    assert do(scheduler) == [("0", 8, 9)]
    assert young.state is State.WAITING
    assert (young.pages, young.num_computed, young.num_output, scheduler.num_preempted) == ([], 0, 5, 1)
    scheduler.finish(old)
    found = do(scheduler)
    assert found == [("1", 4, 9)], "its first page was still there: the other went to the one that stayed"
    assert young.num_cached == 0, "what was found is what the prompt found when it first ran"


def test_whoever_waits_first_starts_first() -> None:
    """A small request does not overtake a large one, which would wait for ever."""
    scheduler = make(num_pages=4)
    running = add(scheduler, 0, 8, num=8)
    do(scheduler)
    add(scheduler, 1, 8, num=8)
    add(scheduler, 2, 1)
    assert [name for name, _, _ in do(scheduler)] == ["0"]
    scheduler.finish(running)
    assert [name for name, _, _ in do(scheduler)] == ["1"]


def test_two_that_run_share_the_pages_of_their_beginning() -> None:
    scheduler = make()
    beginning = list(range(8))
    add(scheduler, 0, [*beginning, 50])
    do(scheduler)
    do(scheduler)
    second = add(scheduler, 1, [*beginning, 60, 61])
    assert do(scheduler)[1] == ("1", 8, 10)
    assert second.pages[:2] == scheduler.running[0].pages[:2]
    assert scheduler.pool.counts.held == 3 + 1


def test_drafts_come_after_all_else_and_nobody_gives_way_for_them() -> None:
    scheduler = make(num_pages=4, max_running=2, max_step_tokens=8, num_draft=6)
    repeating = [1, 2, 3, 1, 2, 3]
    first = add(scheduler, 0, list(repeating), ngrams=True)
    scheduler.schedule()
    scheduler.computed(Work(first, 0, 6), 0)
    first.tokens.append(1)
    first.ngrams.extend([1])
    second = add(scheduler, 1, [9, 9, 9, 9, 8], num=3)
    works = scheduler.schedule()
    assert works[0].draft == (2, 3, 1, 2, 3, 1)
    assert works[0].num_tokens == 7
    assert works[1:] == [], "the cache has no room for the other's two pages"
    assert len(first.pages) == 4
    first.tokens += [2, 3, 7]
    scheduler.computed(works[0], 2)
    assert first.num_computed == 9
    assert first.is_decoding
    scheduler.finish(first)
    assert [work.request for work in scheduler.schedule()] == [second]


def test_drafts_stay_within_what_may_come() -> None:
    scheduler = make(num_draft=5, max_step_tokens=20)
    request = add(scheduler, 0, [1, 2, 1, 2, 1, 2], num=3, ngrams=True)
    do(scheduler)
    request.tokens[-1] = 1
    request.ngrams.extend([1])
    (work,) = scheduler.schedule()
    assert len(request.tokens) + len(work.draft) + 1 == request.last


def test_what_cannot_fit_is_refused() -> None:
    scheduler = make(num_pages=2)
    with pytest.raises(UsageError, match="the cache holds 8"):
        add(scheduler, 0, 5, num=4)
    assert not scheduler.has_work
    with pytest.raises(UsageError):
        Limits(max_running=4, max_step_tokens=3)


def test_a_page_is_known_only_once_all_of_it_is_computed() -> None:
    scheduler = make()
    request = add(scheduler, 0, 14)

    def num_known() -> int:
        found = scheduler.pool.acquire(request.hashes)
        scheduler.pool.release(found)
        return len(found)

    do(scheduler)
    assert num_known() == 2, "8 of 14 tokens"
    do(scheduler)
    assert num_known() == 3
    do(scheduler)
    assert (len(request.tokens), request.num_computed, num_known()) == (16, 15, 3)
    do(scheduler)
    assert num_known() == 4
