"""The warning about a language that was not calibrated."""

import json
from pathlib import Path

import pytest

from blockscale.evaluation.calibrated import calibrated_words, language_notices, stored_record
from blockscale.texts import Text, read_text
from blockscale.texts.short_words import ENOUGH_WORDS, MIN_WORDS, SAME_LANGUAGE_FEW_WORDS, short_words


def record(*names: str) -> dict[str, object]:
    texts = [{"name": n, "short_words": short_words(read_text(n).content).to_dict()} for n in names]
    return json.loads(json.dumps({"calibration": {"seed": 0, "texts": texts}}))


ENGLISH, PORTUGUESE = read_text("en-evaluation"), read_text("pt-evaluation")


def notices(text: Text, stored: dict[str, object], start: float = 0.0, num_tokens: int = 10_000) -> list[str]:
    return language_notices(text, start, num_tokens, stored)


def test_a_language_that_was_not_calibrated() -> None:
    (notice,) = notices(PORTUGUESE, record("en-calibration"))
    assert notice.startswith("the language of pt-evaluation was probably not calibrated: its short words are 0.")
    assert "from those of en-calibration, the nearest" in notice
    assert notices(ENGLISH, record("pt-calibration"))


def test_languages_that_were() -> None:
    for text in (ENGLISH, PORTUGUESE):
        assert not notices(text, record("en-calibration", "pt-calibration"))
    assert not notices(ENGLISH, record("en-calibration"))


def test_texts_of_one_name_all_count() -> None:
    stored = record("pt-calibration", "en-calibration")
    for text in stored["calibration"]["texts"]:  # type: ignore[index]
        text["name"] = "train"
    assert not notices(PORTUGUESE, stored)
    assert not notices(ENGLISH, stored)


def test_only_the_part_that_is_measured_counts() -> None:
    mixed = Text("mixed", ENGLISH.content + PORTUGUESE.content)
    assert not notices(mixed, record("en-calibration"), num_tokens=1500)
    assert notices(mixed, record("en-calibration"), start=len(ENGLISH.content) / len(mixed.content), num_tokens=1500)


def test_too_little_text_says_nothing() -> None:
    assert not notices(PORTUGUESE, record("en-calibration"), num_tokens=100)
    short = record("en-calibration")
    short["calibration"]["texts"][0]["short_words"]["num_words"] = MIN_WORDS - 1  # type: ignore[index]
    assert not notices(PORTUGUESE, short)


def test_a_few_words_are_judged_mildly_and_hide_no_language() -> None:
    few = Text("few", PORTUGUESE.content[:4000])
    assert MIN_WORDS <= short_words(few.content).num_words < ENOUGH_WORDS
    (notice,) = notices(few, record("en-calibration"))
    assert notice.endswith(f"at most {SAME_LANGUAGE_FEW_WORDS:g}")
    assert not notices(few, record("pt-calibration"))
    both = record("en-calibration", "pt-calibration")
    assert not notices(PORTUGUESE, both)
    both["calibration"]["texts"][1]["short_words"]["num_words"] = MIN_WORDS - 1  # type: ignore[index]
    assert notices(PORTUGUESE, both), "what is too short to tell does not stand for its language"


def test_a_checkpoint_that_was_converted_since() -> None:
    converted = {"recipe": "x", "source": {"source": record("en-calibration")}}
    assert [name for name, _ in calibrated_words(converted)] == ["en-calibration"]
    assert notices(PORTUGUESE, converted)


@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"calibration": None},
        {"calibration": []},
        {"calibration": {"texts": {}}},
        {"calibration": {"texts": [1, {"short_words": "x"}, {}]}},
        {"source": None},
        {"source": "other"},
    ],
)
def test_checkpoints_that_say_nothing(stored: dict[str, object]) -> None:
    assert calibrated_words(stored) == []
    assert not notices(PORTUGUESE, stored)


def test_the_record_of_a_folder(tmp_path: Path) -> None:
    assert stored_record(tmp_path) == {}
    (tmp_path / "blockscale.json").write_text('{"recipe": "r"}')
    assert stored_record(tmp_path) == {"recipe": "r"}
