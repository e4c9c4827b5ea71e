"""Which request holds which page of the cache, and what full pages hold, so that equal beginnings are computed once.

A page is in one of three places: free (holds nothing), kept (no request holds it, but what it holds may serve again),
or held by one request or more. Full pages are known by a hash of all tokens up to their end, of the model and of how
the cache is stored, so that a page is only ever found for what it holds.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from blockscale.errors import EngineError, UsageError

_DIGEST_BYTES = 16  # two texts of one hash would share keys and values: 2^-64 for 2^32 pages


@dataclass(frozen=True)
class PageCounts:
    """Pages by where they are; together, all there are."""

    free: int
    kept: int
    held: int


class PagePool:
    """Hands out the pages 0 .. num_pages - 1.

    identity  names the model and the format of the cache; part of every hash
    """

    def __init__(self, num_pages: int, page_size: int, identity: str = "") -> None:
        if num_pages < 1 or page_size < 1:
            raise UsageError(f"a pool of {num_pages} pages of {page_size} tokens", hint="give at least one of each")
        self.num_pages = num_pages
        self.page_size = page_size
        self._root = hashlib.blake2b(f"{page_size} {identity}".encode(), digest_size=_DIGEST_BYTES).digest()
        # The last one that was given back is given out first: its memory is in use already, and near
        self._free = list(reversed(range(num_pages)))
        self._kept: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._holders = [0] * num_pages
        self._hashes: list[bytes | None] = [None] * num_pages
        self._by_hash: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give, kept ones included."""
        return len(self._free) + len(self._kept)

    @property
    def counts(self) -> PageCounts:
        return PageCounts(len(self._free), len(self._kept), self.num_pages - self.num_available)

    def extend_hashes(self, hashes: list[bytes], tokens: Sequence[int]) -> None:
        """Appends the hashes of `tokens`' full pages that `hashes` does not have yet."""
        for page in range(len(hashes), len(tokens) // self.page_size):
            text = np.array(tokens[page * self.page_size : (page + 1) * self.page_size], dtype=np.int64).tobytes()
            before = hashes[-1] if hashes else self._root
            hashes.append(hashlib.blake2b(before + text, digest_size=_DIGEST_BYTES).digest())

    def acquire(self, hashes: Sequence[bytes]) -> list[int]:
        """Pages of as many of the first hashes as are known, now held once more."""
        found = []
        for digest in hashes:
            page = self._by_hash.get(digest)
            if page is None:
                break
            if self._holders[page] == 0:
                del self._kept[page]
            self._holders[page] += 1
            found.append(page)
        return found

    def allocate(self, num: int) -> list[int] | None:
        """So many pages that nobody holds: free ones, else those not used for longest. None if there are not enough."""
        if num > self.num_available:
            return None
        pages = []
        for _ in range(num):
            page = self._free.pop() if self._free else self._forget_oldest()
            self._holders[page] = 1
            pages.append(page)
        return pages

    def publish(self, page: int, digest: bytes) -> None:
        """Says what a held, full page holds. Does nothing where another page is known to hold the same."""
        if self._holders[page] == 0:
            raise EngineError(f"page {page} is published and nobody holds it")
        if digest not in self._by_hash and self._hashes[page] is None:
            self._by_hash[digest] = page
            self._hashes[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each page. The last of a text are forgotten first: they are of use to the fewest."""
        for page in reversed(pages):
            if self._holders[page] == 0:
                raise EngineError(f"page {page} is released and nobody holds it")
            self._holders[page] -= 1
            if self._holders[page] > 0:
                continue
            if self._hashes[page] is None:
                self._free.append(page)
            else:
                self._kept[page] = None

    def forget(self) -> None:
        """Empties the prefix cache; held pages stay held."""
        while self._kept:
            self._free.append(self._forget_oldest())
        self._by_hash.clear()
        self._hashes = [None] * self.num_pages

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """EngineError unless every page is in one place and has as many holders as lists of `held` name it."""
        holders = Counter(page for pages in held for page in pages)
        places = Counter(self._free) + Counter(self._kept.keys()) + Counter(holders.keys())
        for page in range(self.num_pages):
            digest = self._hashes[page]
            for is_right, what in (
                (places[page] == 1, f"is in {places[page]} places"),
                (holders[page] == self._holders[page], f"has {self._holders[page]} holders, {holders[page]} known"),
                (digest is None or self._by_hash.get(digest) == page, "has a hash that leads elsewhere"),
                (digest is not None or page not in self._kept, "is kept and holds nothing known"),
            ):
                if not is_right:
                    raise EngineError(f"page {page} {what}", hint="this is a fault of the engine: please report it")
        if len(places) != self.num_pages or len(self._by_hash) != sum(h is not None for h in self._hashes):
            raise EngineError("pages are known that the pool does not have", hint="this is a fault of the engine")

    def _forget_oldest(self) -> int:
        page, _ = self._kept.popitem(last=False)
        digest = self._hashes[page]
        assert digest is not None
        del self._by_hash[digest]
        self._hashes[page] = None
        return page
