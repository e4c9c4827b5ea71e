"""Batches of windows, and what is left of them when some give NaN or Inf."""

from collections.abc import Sequence

import pytest
import torch

from blockscale.errors import ModelError, NonFiniteError
from blockscale.quantization.windows import BATCH, Windows, run_sound


def test_batches_keep_their_place_when_windows_go() -> None:
    windows = Windows(torch.arange(40).reshape(20, 2))
    assert BATCH == 8
    assert [len(batch) for batch in windows.batches] == [8, 8, 4]
    assert windows.num_tokens == 40
    assert windows.notices == ()
    left = windows.without({3: "x holds NaN"}).without(dict.fromkeys(range(16, 20), "y holds NaN"))
    assert left.batches == ((0, 1, 2, 4, 5, 6, 7), tuple(range(8, 16)))
    assert left.tokens((4, 5)).tolist() == [[8, 9], [10, 11]]
    assert left.num_tokens == 30
    (notice,) = left.notices
    assert notice.startswith("5 of 20 calibration windows are left out")
    assert notice.endswith("first, x holds NaN")
    assert windows.num_tokens == 40


@pytest.mark.parametrize(("count", "faults", "is_enough"), [(1, 1, False), (2, 1, True), (3, 2, False), (4, 2, True)])
def test_at_most_half_can_be_left_out(count: int, faults: int, is_enough: bool) -> None:
    windows, found = Windows(torch.zeros(count, 8)), dict.fromkeys(range(faults), "x holds NaN or Inf")
    if is_enough:
        assert windows.without(found).num_tokens == 8 * (count - faults)
        return
    with pytest.raises(ModelError, match="x holds NaN or Inf on the calibration text") as error:
        windows.without(found)
    assert "damaged" in error.value.hint


class Runs:
    """Fails for a place in `bad`, and for all of `together` at once."""

    def __init__(self, bad: Sequence[int] = (), together: Sequence[int] = ()) -> None:
        self.bad, self.together, self.places = bad, together, []

    def __call__(self, places: Sequence[int]) -> tuple[int, ...]:
        self.places.append(tuple(places))
        bad = [place for place in places if place in self.bad]
        if bad or (self.together and set(self.together) <= set(places)):
            raise NonFiniteError(f"{bad or 'all'}")
        return tuple(places)


def test_a_sound_batch_runs_once() -> None:
    runs = Runs()
    assert run_sound((5, 6, 7), runs) == ((0, 1, 2), {})
    assert runs.places == [(0, 1, 2)]


def test_bad_windows_are_found_one_by_one() -> None:
    runs = Runs(bad=(0, 2))
    assert run_sound((5, 6, 7, 8), runs) == ((1, 3), {5: "[0]", 7: "[2]"})
    assert runs.places[-1] == (1, 3), "what the last run has shown is what counts"


def test_a_batch_without_sound_windows() -> None:
    assert run_sound((5, 6), Runs(bad=(0, 1))) == (None, {5: "[0]", 6: "[1]"})
    assert run_sound((5,), Runs(bad=(0,))) == (None, {5: "[0]"})


def test_windows_that_fail_only_together_all_go() -> None:
    assert run_sound((5, 6), Runs(together=(0, 1))) == (None, {5: "all", 6: "all"})
    assert run_sound((5, 6, 7), Runs(bad=(0,), together=(1, 2))) == (None, {5: "[0]", 6: "[0]", 7: "[0]"})
