"""The pool of pages: never two owners for one page, never a page lost, never a page found for another text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from blockscale.engine.pages import PageCounts, PagePool
from blockscale.errors import EngineError, UsageError

SIZE = 4


def hashes_of(pool: PagePool, tokens: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    pool.extend_hashes(hashes, tokens)
    return hashes


def write(pool: PagePool, tokens: list[int]) -> list[int]:
    """A request that computed all of `tokens`: the pages that it holds."""
    pages = pool.allocate(-(-len(tokens) // SIZE))
    assert pages is not None
    for page, digest in zip(pages, hashes_of(pool, tokens), strict=False):
        pool.publish(page, digest)
    return pages


def test_pages_are_given_once_and_come_back() -> None:
    pool = PagePool(3, SIZE)
    first, second = pool.allocate(2), pool.allocate(1)
    assert first is not None
    assert second is not None
    assert sorted(first + second) == [0, 1, 2]
    assert pool.allocate(1) is None
    pool.check_integrity([first, second])
    pool.release(first)
    pool.check_integrity([second])
    assert pool.counts == PageCounts(free=2, kept=0, held=1)
    assert pool.allocate(0) == []


def test_what_was_published_is_found_by_the_same_beginning_alone() -> None:
    pool = PagePool(8, SIZE)
    tokens = list(range(10))
    pages = write(pool, tokens)
    pool.release(pages)
    assert pool.counts == PageCounts(free=6, kept=2, held=0)
    assert pool.acquire(hashes_of(pool, tokens)) == pages[:2]
    assert pool.acquire(hashes_of(pool, [*range(4), 9, 5, 6, 7])) == pages[:1]
    assert pool.acquire(hashes_of(pool, [9, *range(1, 8)])) == []
    assert pool.acquire(hashes_of(pool, tokens[4:])) == [], "a page's hash says what stands before it"
    assert pool.acquire(hashes_of(PagePool(1, SIZE, "another model"), tokens)) == []
    pool.check_integrity([pages[:2], pages[:1]])


def test_hashes_grow_as_the_text_does() -> None:
    pool = PagePool(1, SIZE)
    tokens, hashes = [3, 1, 4, 1, 5, 9, 2, 6, 5], []
    for end in range(len(tokens) + 1):
        pool.extend_hashes(hashes, tokens[:end])
        assert len(hashes) == end // SIZE
    assert hashes == hashes_of(pool, tokens)


def test_the_page_that_was_not_used_for_longest_goes_first_and_of_a_text_its_end() -> None:
    pool = PagePool(5, SIZE)
    old, new = list(range(8)), list(range(20, 28))
    for tokens in (old, new):
        pool.release(write(pool, tokens))
    pool.release(pool.acquire(hashes_of(pool, old)))  # used again
    taken = pool.allocate(2)
    assert taken is not None
    assert len(pool.acquire(hashes_of(pool, new))) == 1
    assert len(pool.acquire(hashes_of(pool, old))) == 2


def test_equal_texts_computed_at_once_keep_their_own_pages() -> None:
    pool = PagePool(4, SIZE)
    tokens = list(range(8))
    first, second = write(pool, tokens), write(pool, tokens)
    pool.release(first)
    pool.release(second)
    assert pool.counts == PageCounts(free=2, kept=2, held=0)
    pool.check_integrity([])


def test_forgetting_leaves_held_pages_alone() -> None:
    pool = PagePool(4, SIZE)
    pages = write(pool, list(range(8)))
    pool.release(write(pool, list(range(30, 38))))
    pool.forget()
    pool.check_integrity([pages])
    assert pool.acquire(hashes_of(pool, list(range(8)))) == []
    pool.release(pages)
    assert pool.counts == PageCounts(free=4, kept=0, held=0)


def test_faults_are_found() -> None:
    pool = PagePool(2, SIZE)
    pages = pool.allocate(1)
    assert pages is not None
    for wrong in ([], [pages, pages], [[*pages, 1]], [[0, 7]]):
        with pytest.raises(EngineError):
            pool.check_integrity(wrong)
    pool.release(pages)
    with pytest.raises(EngineError, match="released and nobody holds it"):
        pool.release(pages)
    with pytest.raises(EngineError, match="published and nobody holds it"):
        pool.publish(0, b"x")
    with pytest.raises(UsageError):
        PagePool(0, SIZE)


class Pool(RuleBasedStateMachine):
    """Against a model that knows what each page holds."""

    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(6, SIZE)
        self.held: dict[int, list[int]] = {}
        self.content: dict[int, tuple[int, ...]] = {}
        self.next = 0

    @rule(target=holders, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def start(self, tokens: list[int]) -> int:
        self.next += 1
        hashes = hashes_of(self.pool, tokens)
        found = self.pool.acquire(hashes)
        for i, page in enumerate(found):
            assert self.content[page] == tuple(tokens[: (i + 1) * SIZE])
        pages = self.pool.allocate(-(-len(tokens) // SIZE) - len(found))
        if pages is None:
            self.pool.release(found)
            return -1
        for i, page in enumerate(pages, len(found)):
            self.content[page] = tuple(tokens[: (i + 1) * SIZE])
        for page, digest in zip(found + pages, hashes, strict=False):
            self.pool.publish(page, digest)
        self.held[self.next] = found + pages
        return self.next

    @rule(holder=consumes(holders))
    def end(self, holder: int) -> None:
        if holder in self.held:
            self.pool.release(self.held.pop(holder))

    @invariant()
    def is_whole(self) -> None:
        self.pool.check_integrity(self.held.values())
        assert self.pool.counts.held == len({page for pages in self.held.values() for page in pages})


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20), st.lists(st.integers(0, 2**31 - 1), max_size=20))
@settings(max_examples=100, deadline=None)
def test_hashes_are_equal_as_far_as_the_texts_are(a: list[int], b: list[int]) -> None:
    pool = PagePool(1, SIZE)
    for i, (x, y) in enumerate(zip(hashes_of(pool, a), hashes_of(pool, b), strict=False), 1):
        assert (x == y) == (a[: i * SIZE] == b[: i * SIZE])
