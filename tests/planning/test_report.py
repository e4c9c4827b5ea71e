"""The page of a plan, in each language. Needs nothing."""

import datetime
import re
import string
from pathlib import Path

import pytest

from blockscale.errors import OutputError, UsageError
from blockscale.planning.answer.language import LANGUAGES, language
from blockscale.planning.answer.result import PlanResult
from blockscale.planning.planner import plan
from blockscale.planning.report.page import render_plan, write_plan
from blockscale.planning.report.plots import Mark, log_plot, log_ticks, stacks
from blockscale.planning.speed.predict import Estimate
from tests.page_parser import Page

DAY = datetime.date(2026, 12, 1)


@pytest.fixture(scope="module")
def results() -> dict[str, PlanResult]:
    return {
        "one": plan("llama-3.1-70b", gpu="b200", format="nvfp4", kv_cache="fp8", concurrency=64),
        "compared": plan("llama-3.1-70b", gpu="b200", format="nvfp4", compare=["fp8@h200", "bf16@h200"]),
        "searched": plan("llama-3.1-8b", ttft_ms=500, itl_ms=20, rate=20),
        "too large": plan("llama-3.1-405b", gpu="h200", format="bf16"),
        "overloaded": plan("llama-3.1-70b", gpu="h100", format="nvfp4", rate=1000),
        "at a rate": plan("llama-3.1-70b", gpu="b200", gpus=8, format="nvfp4", rate=4.0, compare=["fp8@1xh200"]),
        "no tokens": plan("flux.1-dev", gpu="rtx-4090", format="nvfp4"),
        "roadmap": plan("llama-3.1-8b", gpu="rubin", format="nvfp4"),
    }


NAMES = ("one", "compared", "searched", "too large", "overloaded", "at a rate", "no tokens", "roadmap")


@pytest.mark.parametrize("code", LANGUAGES)
@pytest.mark.parametrize("name", NAMES)
def test_every_page_is_whole(results: dict[str, PlanResult], name: str, code: str) -> None:
    html = render_plan(results[name], code, DAY)
    page = Page(html)  # nesting, ids, references, nothing from elsewhere
    assert f'<html lang="{code}">' in html
    assert "script" not in page.tags
    assert "{" not in page.text.split("}")[-1]  # no name was left unfilled
    assert not re.search(r"\b(nan|inf|None)\b", page.text)
    assert "2026-12-01" in page.text


def test_the_answer_comes_first(results: dict[str, PlanResult]) -> None:
    text = Page(render_plan(results["one"], "en", DAY)).text
    assert text.index("The answer") < text.index("Figures") < text.index("Assumptions")
    assert "llama-3.1-70b fits 1 x B200" in text
    assert "42.7 GB" in text


def test_brazilian_portuguese(results: dict[str, PlanResult]) -> None:
    text = Page(render_plan(results["one"], "pt-BR", DAY)).text
    assert "llama-3.1-70b cabe em 1 x B200" in text
    assert "42,7 GB" in text
    assert "1.024 tokens de entrada" in text
    english = Page(render_plan(results["one"], "en", DAY)).text
    english = english[english.index("The answer") :]
    english = english[: english.index("Assumptions")]  # sources of assumptions are in English everywhere
    sentences = [line for line in english.splitlines() if len(line.split()) > 5 and not line.startswith("1 x ")]
    assert len(sentences) > 5
    assert not [line for line in sentences if line in text]


def test_a_rate_and_what_cannot_serve_it(results: dict[str, PlanResult]) -> None:
    text = Page(render_plan(results["at a rate"], "en", DAY)).text
    assert re.search(r"\d+ % of what it can serve", text)
    assert "cannot serve this rate" in text
    assert "grows without end" in text
    assert "is chosen for 8 x B200" in text
    portuguese = Page(render_plan(results["at a rate"], "pt-BR", DAY)).text
    assert "não atende a essa taxa" in portuguese
    assert "foi escolhida para 8 x B200" in portuguese


def test_plots_are_drawn(results: dict[str, PlanResult]) -> None:
    one, compared, searched = (Page(render_plan(results[n])).tags for n in ("one", "compared", "searched"))
    assert one.count("svg") == 3  # the curve, memory, cost
    assert compared.count("rect") > one.count("rect")
    assert searched.count("svg") == one.count("svg") + 1
    assert one.count("circle") == len(results["one"].curve)


def test_what_does_not_fit_is_said_with_what_does(results: dict[str, PlanResult]) -> None:
    text = Page(render_plan(results["too large"], "en", DAY)).text
    assert "does not fit" in text
    assert "8 x H200 SXM, tp8, bf16" in text


def test_names_are_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(1)<"
    folder.mkdir()
    from tests.planning.test_plan import config

    html = render_plan(plan(config(folder), gpu="h100"))
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_it_is_written_whole_or_not_at_all(tmp_path: Path, results: dict[str, PlanResult]) -> None:
    write_plan(results["one"], tmp_path / "a" / "plan.html", "pt-BR")
    assert (tmp_path / "a" / "plan.html").read_text().endswith("</html>")
    with pytest.raises(OutputError):
        write_plan(results["one"], tmp_path)


def test_languages_have_the_same_texts() -> None:
    def fields(text: str) -> set[str]:
        return {name for _, name, _, _ in string.Formatter().parse(text) if name}

    first, *others = (language(code) for code in LANGUAGES)
    for other in others:
        assert set(other.texts) - {k for k in other.texts if k.startswith("word.")} == set(first.texts) - {
            k for k in first.texts if k.startswith("word.")
        }
        for key, text in first.texts.items():
            if key in other.texts:
                assert fields(text) == fields(other.texts[key]), key


def test_numbers_are_written_as_each_language_has_them() -> None:
    en, pt = language("en"), language("pt-br")
    assert (en.number(1234.5), pt.number(1234.5)) == ("1,230", "1.230")
    assert (en.number(0.2345, 2), pt.number(0.2345, 2)) == ("0.23", "0,23")
    assert (en.size(42.7e9), pt.size(42.7e9)) == ("42.7 GB", "42,7 GB")
    assert (en.count(1024), pt.count(1024)) == ("1,024", "1.024")
    assert pt.range(Estimate(1.5, 1.0, 2.0), 2) == "1,0 a 2,0"
    assert language("pt").code == "pt-BR"
    with pytest.raises(UsageError):
        language("de")


def test_ticks_cover_what_is_drawn() -> None:
    assert log_ticks(3, 70) == [2, 5, 10, 20, 50, 100]
    assert log_ticks(10, 10) == [10, 20]
    for low, high in ((0.013, 900.0), (1.0, 5.0), (7.0, 7.1)):
        ticks = log_ticks(low, high)
        assert ticks[0] <= low * (1 + 1e-9)
        assert ticks[-1] >= high * (1 - 1e-9)


def test_a_plot_keeps_order_and_bounds() -> None:
    points = [Mark(x, y, y / 2, y * 2, "") for x, y in ((1.0, 100.0), (10.0, 30.0))]
    plot = log_plot([("a", points)], str)
    assert plot is not None
    left, right = plot.lines[0].marks
    assert plot.left <= left.x < right.x <= plot.right
    assert left.y < right.y  # higher figures stand higher
    for mark in (left, right):
        assert mark.high < mark.y < mark.low <= plot.bottom
    assert log_plot([], str) is None


def test_bars_are_as_long_as_their_figures() -> None:
    drawn = stacks([("a", [("x", 30.0), ("y", 10.0), ("none", 0.0)], 50.0), ("b", [("y", 25.0)], None)], str)
    assert drawn is not None
    first, second = drawn.stacks
    assert first.pieces[0].width == pytest.approx(3 * first.pieces[1].width, abs=0.2)
    assert second.pieces[0].kind == first.pieces[1].kind
    assert [name for name, _ in drawn.kinds] == ["x", "y"]
    assert drawn.limits[0] is not None
    assert drawn.limits[0] > first.end
    assert stacks([("a", [("x", 0.0)], None)], str) is None
