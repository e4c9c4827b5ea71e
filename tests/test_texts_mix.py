"""Weights of texts as users write them."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockscale.errors import UsageError
from blockscale.texts.mix import Part, parse_mix


def shares(*sources: object) -> list[tuple[str, float]]:
    return [(str(part.source), pytest.approx(part.share)) for part in parse_mix(sources)]  # type: ignore[arg-type]


def test_without_weights_all_share_equally() -> None:
    assert shares("en.txt", Path("pt.txt"), "en-calibration") == [
        ("en.txt", 1 / 3),
        ("pt.txt", 1 / 3),
        ("en-calibration", 1 / 3),
    ]
    assert parse_mix([]) == ()


def test_weights_become_shares() -> None:
    assert shares("en.txt:0.5", "pt.txt:0.5") == [("en.txt", 0.5), ("pt.txt", 0.5)]
    assert shares("en.txt:3", ("pt:7.txt", 1)) == [("en.txt", 0.75), ("pt:7.txt", 0.25)]
    assert shares("hf:a/b:train:text:1e0", "c:1") == [("hf:a/b:train:text", 0.5), ("c", 0.5)]


def test_the_rest_is_shared_by_those_without() -> None:
    assert shares("en.txt:0.5", "pt.txt", "code.py") == [("en.txt", 0.5), ("pt.txt", 0.25), ("code.py", 0.25)]
    for weight in ("1", "3"):
        with pytest.raises(UsageError, match=r"leave nothing for pt\.txt"):
            parse_mix([f"en.txt:{weight}", "pt.txt"])


def test_what_stands_behind_a_colon_and_is_no_number_is_part_of_the_name() -> None:
    assert shares("en.txt:half", "hf:a/b:train", "a:", ":0.5") == [
        (name, 0.25) for name in ("en.txt:half", "hf:a/b:train", "a:", ":0.5")
    ]


def test_a_file_with_a_colon_wins(tmp_path: Path) -> None:
    path = tmp_path / "chapter:1"
    path.write_text("x")
    assert parse_mix([str(path)]) == (Part(str(path), 1.0),)
    assert parse_mix([f"{path}:2", "y:2"]) == (Part(str(path), 0.5), Part("y", 0.5))
    assert parse_mix([Path("chapter:7")]) == (Part(Path("chapter:7"), 1.0),)


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "-inf", "-0.0"])
def test_weights_that_are_none(weight: str) -> None:
    for source in (f"en.txt:{weight}", ("en.txt", float(weight))):
        with pytest.raises(UsageError, match=r"the weight of text en\.txt is") as error:
            parse_mix([source, "pt.txt:1"])
        assert error.value.hint


@pytest.mark.parametrize("source", [("a", "1"), ("a", True), ("a", None), ("a",), ("a", 1, 2)])
def test_tuples_that_are_none(source: object) -> None:
    with pytest.raises(UsageError):
        parse_mix([source])  # type: ignore[list-item]


def test_weights_that_cannot_be_added() -> None:
    with pytest.raises(UsageError, match="too large"):
        parse_mix(["a:1e308", "b:1e308"])


def test_one_name_is_no_list() -> None:
    for name in ("en.txt", Path("en.txt")):
        with pytest.raises(UsageError, match="one name"):
            parse_mix(name)  # type: ignore[arg-type]


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=9))
def test_shares_sum_to_one(weights: list[float]) -> None:
    parts = parse_mix([("a", weight) for weight in weights])
    assert math.isclose(sum(part.share for part in parts), 1)
    assert all(math.isclose(p.share * sum(weights), w) for p, w in zip(parts, weights, strict=True))
