import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from blockscale.errors import OutputError
from blockscale.evaluation.report import (
    MARKS,
    MAX_LAYER_ROWS,
    decibels,
    limits,
    number,
    percentage,
    render_report,
    size,
    write_report,
)
from blockscale.evaluation.result import Interval, LayerError, Report, TaskComparison, TaskResult, TextResult

VOID = {"meta", "link", "br", "hr", "img", "input", "wbr"}
EVIL = '<script>alert("x")</script>&\'"'

TEXT = TextResult(
    "en.txt",
    1000,
    4,
    Interval(10.5, 9.0, 12.0),
    Interval(10.0, 8.5, 11.5),
    Interval(1.05, 1.02, 1.08),
    Interval(0.05, 0.04, 0.06),
    0.7,
    Interval(0.91, 0.9, 0.92),
)
FULL = Report(
    model="m-nvfp4",
    reference="m",
    texts=(TEXT, replace(TEXT, name="pt.txt", perplexity=Interval(math.nan))),
    layers=(
        LayerError("model.layers.0.mlp.up_proj", "nvfp4", 20.5, 4.5, 12345),
        LayerError("model.layers.1.mlp.up_proj", "nvfp4", math.inf, 4.5, 12345),
        LayerError("lm_head", "fp8", 31.0, 8.0, 12345),
    ),
    tasks=(TaskResult("quiz", "acc", Interval(0.5, 0.3, 0.7), 40, {"acc": 0.5}),),
    task_comparisons=(TaskComparison("quiz", "acc", 0.5, 0.55, Interval(-0.05, -0.1, 0.0), 1, 3, 0.625),),
    convention="Windows of 512 tokens.",
    recipe="nvfp4-gptq",
    versions={"torch": "2.13.0"},
    bytes=104_857_600,
    bits_per_parameter=4.87,
    date="2025-01-02",
)


class Page(HTMLParser):
    """Checks nesting, unique ids and references as it reads."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))
        assert set(self.references) <= set(self.ids)

    def handle_starttag(self, tag, attributes) -> None:
        assert len({name for name, _ in attributes}) == len(attributes), f"an attribute twice in <{tag}>"
        self.tags.append(tag)
        for name, value in attributes:
            assert name not in ("src", "href", "srcset", "onload", "onclick", "action"), f"{name} in <{tag}>"
            if name == "id":
                self.ids.append(value)
            if name == "aria-labelledby":
                self.references.append(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes) -> None:
        assert "svg" in self.open, f"<{tag}/> outside SVG"
        self.tags.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text += data


@pytest.mark.parametrize(
    "report",
    [
        FULL,
        Report("m"),
        Report("m", texts=(TextResult("t", 5, 1, Interval(3.0)),)),
        Report("m", texts=(TextResult("t", 5, 1, Interval(math.nan)),)),
        replace(FULL, texts=(), task_comparisons=()),
    ],
)
def test_pages_are_well_formed(report) -> None:
    page = Page(render_report(report))
    assert {"html", "head", "title", "body", "main", "h1"} <= set(page.tags)
    assert "script" not in page.tags


def test_the_page_shows_what_was_found() -> None:
    page = Page(render_report(FULL))
    for expected in (
        "m-nvfp4",
        "compared with m, 2025-01-02",
        "en.txt",
        "10.50",
        "9.000 to 12.00",
        "91.00 %",
        "90.00 to 92.00",
        "not finite",
        "quiz",
        "0.62",
        "model.layers.0.mlp.up_proj",
        "20.50",
        "exact",
        "104.86 MB",
        "4.87",
        "Windows of 512 tokens.",
        "Recipe: nvfp4-gptq",
        "2.13.0",
    ):
        assert expected in page.text, expected
    assert page.tags.count("svg") == 4 + 2  # four plots, two keys of the last


def test_names_are_escaped_everywhere() -> None:
    report = Report(
        model=EVIL,
        reference=EVIL,
        texts=(replace(TEXT, name=EVIL),),
        layers=(LayerError(EVIL, EVIL, 20.0, 4.5, 1), LayerError("a.0.b", "nvfp4", 3.0, 4.5, 1)),
        tasks=(TaskResult(EVIL, EVIL, Interval(0.5), 4, {}),),
        task_comparisons=(TaskComparison(EVIL, EVIL, 0.5, 0.5, Interval(0.0), 0, 0, 1.0),),
        convention=EVIL,
        recipe=EVIL,
        versions={EVIL: EVIL},
        date=EVIL,
    )
    html = render_report(report)
    page = Page(html)
    assert "script" not in page.tags
    assert "<script" not in html
    assert page.text.count('alert("x")') >= 12


def test_nothing_is_fetched_from_elsewhere() -> None:
    html = render_report(FULL)
    assert not re.search(r"https?:|//\w|url\(|@import|<script|<link|<img|<iframe", html)


def test_light_dark_and_print() -> None:
    html = render_report(FULL)
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html
    assert html.count("--k7:") == 3


def test_many_layers_are_cut_to_the_worst() -> None:
    layers = tuple(LayerError(f"m.layers.{i}.up_proj", "nvfp4", float(i), 4.5, 10) for i in range(1000))
    page = Page(render_report(Report("m", layers=layers)))
    assert f"The {MAX_LAYER_ROWS} lowest of 1,000 layers" in page.text
    assert "m.layers.999.up_proj" not in page.text


def test_there_is_a_mark_for_each_kind() -> None:
    from blockscale.evaluation.charts import MAX_KINDS

    assert len(set(MARKS)) == MAX_KINDS


def test_figures() -> None:
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
    assert [decibels(x) for x in (20.0, math.inf, math.nan)] == ["20.00", "exact", "not finite"]
    assert [percentage(x) for x in (None, 0.5, math.nan)] == ["–", "50.00 %", "not finite"]
    assert limits(Interval(1.0)) == limits(None) == ""
    assert [size(x) for x in (None, 999, 1500, 2 * 10**13)] == ["–", "999 B", "1.50 kB", "20.00 TB"]


def test_write(tmp_path) -> None:
    path = tmp_path / "sub" / "out.html"
    write_report(FULL, path)
    assert path.read_text(encoding="utf-8") == render_report(FULL)
    assert [p.name for p in path.parent.iterdir()] == ["out.html"]


def test_write_where_it_cannot(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        write_report(FULL, tmp_path / "file" / "out.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError):
        write_report(FULL, tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
