"""One step's work: which requests run, and how many tokens each.

First come, first served. Every request that decodes gets its token in every step; what the budget leaves goes to
prompts, in order of arrival, in pieces where it must. A request gets the pages for all its tokens when it starts, and
one more each time that it outgrows them. Where none is left, the request that arrived last gives all of its pages back
and waits at the head of the queue: it keeps its tokens, and its keys and values are computed again.

So the oldest request always goes on, and every request comes to be the oldest.
"""

import math
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blockscale.engine.pages import PagePool
from blockscale.engine.request import Request, State
from blockscale.errors import UsageError


@dataclass(frozen=True)
class Work:
    """What a step computes of one request: tokens `begin` .. `end - 1`, then those of `draft`.

    begin  tokens before it are computed
    end    of the request's tokens; where it has no more, the next one is sampled, unless they are pooled
    draft  proposed tokens that may come after its last one
    """

    request: Request
    begin: int
    end: int
    draft: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin + len(self.draft)

    @property
    def is_sampled(self) -> bool:
        return self.end == len(self.request.tokens) and self.request.sampling.pooling is None


@dataclass(frozen=True)
class Limits:
    """max_running      requests that hold pages at once
    max_step_tokens  tokens of one step, not fewer than `max_running`: each that decodes has one
    num_draft        tokens proposed a step and request; 0 for none
    """

    max_running: int
    max_step_tokens: int
    num_draft: int = 0
    use_prefix_cache: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= self.max_step_tokens or self.num_draft < 0:
            raise UsageError(
                f"max_running {self.max_running}, max_step_tokens {self.max_step_tokens}, num_draft {self.num_draft}",
                hint="1 <= max_running <= max_step_tokens, num_draft >= 0",
            )


class Scheduler:
    """Requests that wait and requests that run, both in order of arrival.

    num_preempted  so often a request gave its pages back
    """

    def __init__(self, pool: PagePool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preempted = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Puts it into the queue. It must fit into the pool alone: `last` tokens and no more than that."""
        if self._num_pages(request.last) > self.pool.num_pages:
            raise UsageError(
                f"a request of {request.last} tokens: the cache holds {self.pool.num_pages * self.pool.page_size}",
                hint="ask for fewer tokens, or give the cache more pages",
            )
        insort(self.waiting, request, key=lambda r: r.arrival)

    def finish(self, request: Request) -> None:
        """Takes it out, wherever it is, and its pages with it. What full pages hold may be found again."""
        (self.running if request.state is State.RUNNING else self.waiting).remove(request)
        self.pool.release(request.take_pages())
        request.state = State.FINISHED

    def schedule(self) -> list[Work]:
        """The next step. Empty only if there is no work at all."""
        works = [*self._go_on()]
        budget = self.limits.max_step_tokens - sum(work.num_tokens for work in works)
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_running:
            request = self.waiting[0]
            if not self._start(request):
                break  # nobody overtakes it: it would wait for ever
            works.append(self._piece(request, budget))
            budget -= works[-1].num_tokens
        return works

    def ahead(self, works: Sequence[Work]) -> list[Work]:
        """The step after `works`, all of which decode and are still computed, as far as it is sure beforehand: those
        whose requests their tokens cannot bring to their last.

        Empty where others have something to compute as well, or pages are missing: `schedule` says then, once the
        tokens are known.
        """
        known = {id(work.request) for work in works}
        can_start = self.waiting and len(self.running) < self.limits.max_running
        if can_start or any(id(request) not in known for request in self.running):
            return []
        following = []
        for work in works:
            request = work.request
            if request.state is not State.RUNNING or work.end + 1 >= request.last:
                continue
            pages = self.pool.allocate(max(self._num_pages(work.end + 1) - len(request.pages), 0))
            if pages is None:
                return []
            request.add_pages(pages)
            following.append(Work(request, work.end, work.end + 1))
        return following

    def computed(self, work: Work, num_accepted: int) -> None:
        """Notes that a step computed it, and so many tokens of its draft that the request has taken.

        Full pages can be found by other requests from now on.
        """
        request = work.request
        request.num_computed = work.end + num_accepted
        num_full = request.num_computed // self.pool.page_size
        if not self.limits.use_prefix_cache or num_full <= request.num_published:
            return
        self.pool.extend_hashes(request.hashes, request.tokens)
        for page in range(request.num_published, num_full):
            self.pool.publish(request.pages[page], request.hashes[page])
        request.num_published = num_full

    def check_integrity(self) -> None:
        """EngineError unless pages and requests agree: see `PagePool.check_integrity`."""
        self.pool.check_integrity([r.pages for r in (*self.running, *self.waiting)])

    def _go_on(self) -> Iterator[Work]:
        """Running requests, oldest first. Whoever gives way is the youngest, which has not had its turn."""
        num_decoding = sum(r.is_decoding for r in self.running)
        budget = self.limits.max_step_tokens - num_decoding  # for prompts and drafts
        turn = 0
        while turn < len(self.running):
            request = self.running[turn]
            if not self._reserve(request):
                continue  # it gave way itself: the list has become shorter
            turn += 1
            if request.is_decoding:
                draft = self._draft(request, min(budget, self.limits.num_draft))
                budget -= len(draft)
                yield Work(request, request.num_computed, len(request.tokens), draft)
            elif budget > 0:
                work = self._piece(request, budget)
                budget -= work.num_tokens
                yield work

    def _piece(self, request: Request, budget: int) -> Work:
        begin = request.num_computed
        return Work(request, begin, min(begin + budget, len(request.tokens)))

    def _reserve(self, request: Request) -> bool:
        """Sees to it that it has pages for all of its tokens; False where it had to give way."""
        num_missing = self._num_pages(len(request.tokens)) - len(request.pages)
        while num_missing > 0:
            pages = self.pool.allocate(num_missing)
            if pages is not None:
                request.add_pages(pages)
                return True
            youngest = self.running.pop()
            self.pool.release(youngest.take_pages())
            youngest.state = State.WAITING
            insort(self.waiting, youngest, key=lambda r: r.arrival)
            self.num_preempted += 1
            if youngest is request:
                return False
        return True

    def _start(self, request: Request) -> bool:
        """Gives it pages, those that are in the cache first; False, and nothing changes, where there are too few.

        Its last token is computed in any case: the logits after it are what is wanted.
        """
        found: list[int] = []
        if self.limits.use_prefix_cache and not request.needs_every_row:
            self.pool.extend_hashes(request.hashes, request.tokens)
            found = self.pool.acquire(request.hashes[: (len(request.tokens) - 1) // self.pool.page_size])
        pages = self.pool.allocate(self._num_pages(len(request.tokens)) - len(found))
        if pages is None:
            self.pool.release(found)
            return False
        request.add_pages(found + pages)
        request.num_published = len(found)
        request.num_computed = len(found) * self.pool.page_size
        if request.num_cached is None:
            request.num_cached = request.num_computed
        del self.waiting[0]
        self.running.append(request)
        request.state = State.RUNNING
        return True

    def _draft(self, request: Request, num: int) -> tuple[int, ...]:
        """Proposed tokens, no more than it may have besides the one that is sampled. Nobody gives way for them."""
        num = min(num, request.last - len(request.tokens) - 1)
        if request.ngrams is None or num <= 0:
            return ()
        draft = request.ngrams.propose(num)
        num_missing = self._num_pages(len(request.tokens) + len(draft)) - len(request.pages)
        pages = self.pool.allocate(max(num_missing, 0))
        if pages is None:
            draft = draft[: len(request.pages) * self.pool.page_size - len(request.tokens)]
        else:
            request.add_pages(pages)
        return tuple(draft)

    def _num_pages(self, num_tokens: int) -> int:
        return math.ceil(num_tokens / self.pool.page_size)
