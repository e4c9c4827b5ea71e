import math
import re
from dataclasses import replace

import pytest
from page_parser import Page

from blockscale.errors import OutputError
from blockscale.evaluation.report import (
    MARKS,
    MAX_LAYER_ROWS,
    decibels,
    limits,
    render_report,
    write_report,
)
from blockscale.evaluation.result import Interval, LayerError, Report, TaskComparison, TaskResult, TextResult

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
    assert [decibels(x) for x in (20.0, math.inf, math.nan)] == ["20.00", "exact", "not finite"]
    assert limits(Interval(1.0)) == limits(None) == ""


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
