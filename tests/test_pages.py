"""What HTML pages share: figures, escaping, files that appear whole."""

import math

import pytest

from blockscale.errors import OutputError
from blockscale.pages import count, number, percentage, size, write_page


def test_numbers() -> None:
    assert [number(x) for x in (None, math.nan, 0.0, 1.0, 12.3456, 1234.5, 123456.7, 1e-6)] == [
        "–",
        "not finite",
        "0.000",
        "1.000",
        "12.35",
        "1234",
        "123,457",
        "1.000e-06",
    ]
    assert [percentage(x) for x in (None, 0.5, math.nan)] == ["–", "50.00 %", "not finite"]


def test_sizes() -> None:
    assert [size(x) for x in (None, 0, 999, 1500, 2 * 10**13)] == ["–", "0 B", "999 B", "1.50 kB", "20.00 TB"]
    assert size(3 * 10**18) == "3000.00 PB"
    assert [count(x) for x in (None, 0, 12, 1500, 671 * 10**9)] == ["–", "0", "12", "1.50 k", "671.00 B"]


def test_a_page_is_written_whole(tmp_path) -> None:
    write_page("<p>ã</p>", tmp_path / "sub" / "page.html")
    assert (tmp_path / "sub" / "page.html").read_text(encoding="utf-8") == "<p>ã</p>"
    assert [file.name for file in (tmp_path / "sub").iterdir()] == ["page.html"]
    write_page("<p>b</p>", tmp_path / "sub" / "page.html")
    assert (tmp_path / "sub" / "page.html").read_text() == "<p>b</p>"


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="cannot write") as error:
        write_page("x", tmp_path / "folder")
    assert error.value.hint
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]
