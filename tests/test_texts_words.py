"""The measure that tells languages apart, on texts of this package and one in the public domain."""

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockscale.texts import CALIBRATION, EVALUATION, read_text
from blockscale.texts.short_words import (
    ENOUGH_WORDS,
    MIN_WORDS,
    NUM_BUCKETS,
    SAME_LANGUAGE,
    SAME_LANGUAGE_FEW_WORDS,
    ShortWords,
    divergence,
    one_language_limit,
    short_words,
    stored_short_words,
)

BIBLE = Path(__file__).parent / "golden" / "texts" / "en_web.txt"
SHARED = Path(__file__).parents[2] / "shared" / "data" / "text"


def test_words_of_at_most_four_letters_count() -> None:
    words = short_words("The cat, the DOG; o gato não é um cachorro. 1234 x_y")
    assert words.num_words == 11  # the cat the dog o gato não é um x y
    assert sum(words.shares) == pytest.approx(1)
    assert words.shares == short_words("the cat the dog o gato não é um x y").shares
    assert max(words.shares) >= 2 / 11


def test_scripts_without_spaces_count_by_character() -> None:
    assert short_words("私は、学生です。").num_words == 6
    assert short_words("Это не то").num_words == 3


def test_a_text_without_words() -> None:
    words = short_words("1 2 3 ...")
    assert words == ShortWords(0, (0.0,) * NUM_BUCKETS)
    assert stored_short_words(words.to_dict()) is None


def test_divergence_on_what_is_known() -> None:
    def words(*shares: float) -> ShortWords:
        return ShortWords(MIN_WORDS, shares + (0.0,) * (NUM_BUCKETS - len(shares)))

    assert divergence(words(0.5, 0.5), words(0.5, 0.5)) == 0
    assert divergence(words(1, 0), words(0, 1)) == 1
    # half of log2(2 / 1.5) + 1/2 log2(1 / 1.5) + 1/2 log2(1 / 0.5), by hand
    expected = (math.log2(4 / 3) + (math.log2(2 / 3) + 1) / 2) / 2
    assert divergence(words(1, 0), words(0.5, 0.5)) == pytest.approx(expected)
    assert divergence(words(0.5, 0.5), words(1, 0)) == pytest.approx(expected)


def test_fewer_words_have_a_wider_limit() -> None:
    def limit(a: int, b: int) -> float | None:
        return one_language_limit(ShortWords(a, ()), ShortWords(b, ()))

    assert limit(ENOUGH_WORDS, 10_000) == SAME_LANGUAGE
    assert limit(10_000, ENOUGH_WORDS - 1) == SAME_LANGUAGE_FEW_WORDS == limit(MIN_WORDS, MIN_WORDS)
    assert limit(MIN_WORDS - 1, 10_000) is None


def test_languages_are_apart_and_kinds_of_text_are_not() -> None:
    """An essay on number formats and a Gospel are near; the same essay in another language is not."""
    english = [read_text(name) for name in ("en-calibration", "en-evaluation", BIBLE)]
    portuguese = [read_text(name) for name in ("pt-calibration", "pt-evaluation")]
    words = {text.name: short_words(text.content) for text in (*english, *portuguese)}
    assert all(w.num_words > 2 * ENOUGH_WORDS for w in words.values())
    for a, b in itertools.combinations(words, 2):
        distance = divergence(words[a], words[b])
        if a[:2] == b[:2]:
            assert distance < SAME_LANGUAGE - 0.1, (a, b)
        else:
            assert distance > SAME_LANGUAGE + 0.2, (a, b)


def test_a_text_in_two_languages_is_near_both() -> None:
    both = short_words(read_text("en-calibration").content + read_text("pt-calibration").content)
    for name in EVALUATION:
        assert divergence(short_words(read_text(name).content), both) < SAME_LANGUAGE


@pytest.mark.slow
def test_the_threshold_on_other_texts() -> None:
    """Manuals, help pages and a Bible in English and Portuguese: no pair is on the wrong side."""
    if not SHARED.is_dir():
        pytest.skip("the texts are not here")
    names = [f"en_{n}" for n in ("web_sample.txt", "debian_handbook.txt", "debian_reference.txt", "gnome_help.txt")]
    names += [f"pt_{n}" for n in ("focalinux.txt", "gnome_help.txt", "libreoffice_help.zip")]
    words = {name: short_words(read_text(SHARED / name).content[:300_000]) for name in names}
    for a, b in itertools.combinations(names, 2):
        assert (divergence(words[a], words[b]) < SAME_LANGUAGE) == (a[:2] == b[:2]), (a, b)


@given(st.text(max_size=200))
def test_what_is_stored_comes_back(text: str) -> None:
    words = short_words(text)
    stored = stored_short_words(json.loads(json.dumps(words.to_dict())))
    if words.num_words:
        assert stored is not None
        assert stored.num_words == words.num_words
        assert divergence(stored, words) < 1e-4
        assert len(words.to_dict()["shares"]) < 2800  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "record",
    [
        None,
        [],
        {},
        {"num_words": 5},
        {"num_words": "5", "shares": ""},
        {"num_words": 5, "shares": "!"},
        {"num_words": 5, "shares": "AAAA"},
        {"num_words": 5, "shares": "é"},
        {"num_words": 5, "shares": "A" * 2731 + "="},
    ],
)
def test_records_that_are_none(record: object) -> None:
    assert stored_short_words(record) is None


def test_own_texts_suffice() -> None:
    assert all(short_words(read_text(name).content).num_words > ENOUGH_WORDS for name in (*CALIBRATION, *EVALUATION))
