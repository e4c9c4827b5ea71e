import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockscale.errors import UsageError
from blockscale.evaluation.windows import token_windows

BOS, EOS = 1000, 1001


def plain(text: str) -> list[int]:
    """A token per character, numbered by place in the alphabet of code points."""
    return [ord(c) for c in text]


def with_bos(text: str) -> list[int]:
    return [BOS, *plain(text)]


def with_both(text: str) -> list[int]:
    return [BOS, *plain(text), EOS]


def numbered(n: int) -> str:
    """Text of n distinct tokens 0..n-1 under `plain`."""
    return "".join(chr(i) for i in range(n))


def scored(windows) -> list[int]:
    return [token for w in windows for token in w.ids[-w.num_scored :].tolist()]


def test_without_bos_every_token_but_the_first_of_each_window_is_scored() -> None:
    cut = token_windows(numbered(20), plain, window=8)
    assert [w.ids.tolist() for w in cut.windows] == [list(range(8)), list(range(8, 16)), list(range(16, 20))]
    assert scored(cut.windows) == [i for i in range(20) if i not in (0, 8, 16)]
    assert cut.num_tokens == 17
    assert all(w.ids.dtype == torch.int64 for w in cut.windows)


def test_bos_comes_on_top_of_the_window_and_every_text_token_is_scored() -> None:
    cut = token_windows(numbered(20), with_bos, window=8)
    assert [len(w.ids) for w in cut.windows] == [9, 9, 5]
    assert all(w.ids[0] == BOS for w in cut.windows)
    assert scored(cut.windows) == list(range(20))


def test_eos_is_dropped() -> None:
    assert scored(token_windows(numbered(20), with_both, window=8).windows) == list(range(20))


def test_a_last_window_of_one_token_without_context_is_left_out() -> None:
    assert len(token_windows(numbered(17), plain, window=8).windows) == 2
    assert len(token_windows(numbered(17), with_bos, window=8).windows) == 3


def test_sliding_windows_score_the_last_stride_tokens_of_later_windows() -> None:
    cut = token_windows(numbered(20), plain, window=8, stride=3)
    assert cut.windows[0].num_scored == 7
    assert [w.num_scored for w in cut.windows[1:]] == [3, 3, 3, 3]
    assert cut.windows[1].ids.tolist() == list(range(3, 11))
    assert scored(cut.windows) == list(range(1, 20))


@given(
    n=st.integers(2, 200),
    window=st.integers(2, 40),
    data=st.data(),
    encode=st.sampled_from([plain, with_bos, with_both]),
)
def test_every_token_is_scored_at_most_once_and_only_first_ones_never(n, window, data, encode) -> None:
    stride = data.draw(st.integers(1, window))
    cut = token_windows(numbered(n), encode, window=window, stride=stride)
    if encode is not plain:
        expected = list(range(n))
    elif stride == window:
        expected = [i for i in range(n) if i % window]
    else:
        expected = list(range(1, n))
    assert scored(cut.windows) == expected
    assert cut.num_tokens == len(expected)
    assert all(1 <= w.num_scored < len(w.ids) <= window + 1 for w in cut.windows)


def test_start_is_a_fraction_of_the_characters_and_max_tokens_an_exact_count() -> None:
    cut = token_windows(numbered(100), plain, window=8, start=0.3, max_tokens=20)
    assert torch.cat([w.ids for w in cut.windows]).tolist() == list(range(30, 50))
    assert "30 %" in cut.convention
    assert "20 tokens" in cut.convention


def test_the_convention_says_what_was_done() -> None:
    assert "512 tokens without overlap" in token_windows(numbered(9), plain).convention
    assert "no beginning-of-sequence" in token_windows(numbered(9), plain).convention
    assert "beginning-of-sequence token in front" in token_windows(numbered(9), with_bos).convention
    assert "every 4 tokens" in token_windows(numbered(9), plain, window=8, stride=4).convention


@pytest.mark.parametrize(
    "bad",
    [
        {"window": 1},
        {"window": 8, "stride": 9},
        {"window": 8, "stride": 0},
        {"start": 1.0},
        {"start": -0.1},
        {"start": float("nan")},
        {"max_tokens": 1},
    ],
)
def test_bad_parameters(bad) -> None:
    with pytest.raises(UsageError):
        token_windows(numbered(20), plain, **bad)


@pytest.mark.parametrize("text", ["", "a"])
def test_a_text_with_nothing_to_score(text) -> None:
    with pytest.raises(UsageError, match="nothing to score"):
        token_windows(text, plain)
