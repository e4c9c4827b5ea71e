"""The page of an inspection. Needs nothing."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from page_parser import Page

from blockscale.checkpoint.faults import Fault
from blockscale.errors import OutputError
from blockscale.inspection.contents import inspect_folder
from blockscale.inspection.engines import Verdict
from blockscale.inspection.inspect import inspect
from blockscale.inspection.inventory import Inspection, Kept, KVCache, Layer, Linear, Range
from blockscale.inspection.page import MAX_ROWS, render_inspection, shares, write_inspection
from blockscale.inspection.weights import Weight

from .changed_folders import GOLDEN, golden_names

EVIL = '<script>alert("x")</script>&\'"'
NAME = "modelopt_llama_mixed_fp8attn_nvfp4mlp_fp8kv"


def empty(name: str = "m") -> Inspection:
    return Inspection(Path(name), None, "", "", "", (), (), None, 0, (), ())


def linear(name: str, fmt: str = "nvfp4") -> Layer:
    return Layer(name, (Linear(Weight(name, fmt, None, (16, 32), ())),))


@pytest.mark.parametrize("name", golden_names())
@pytest.mark.parametrize("with_scales", [False, True])
def test_pages_are_well_formed(name: str, with_scales: bool) -> None:
    page = Page(render_inspection(inspect_folder(GOLDEN / name, with_scales=with_scales)))
    assert {"html", "head", "title", "body", "main", "h1", "table"} <= set(page.tags)
    assert "script" not in page.tags
    assert ("Block scales" in page.text) == (with_scales and "fp4" in name)


def test_a_page_about_nothing() -> None:
    page = Page(render_inspection(empty()))
    assert "Layers" in page.text
    assert "0 B" in page.text


def test_the_page_shows_what_was_found() -> None:
    text = Page(render_inspection(inspect_folder(GOLDEN / NAME))).text
    for expected in (
        NAME,
        "LlamaForCausalLM, modelopt, written by modelopt 0.47.0",
        "106.82 k",
        "118.53 kB",
        "8.877",
        "model.layers.{0,1}.self_attn.q+k+v_proj",
        "64+32+32 x 64",
        "nvfp4",
        "output head",
        "fp8, scales of 2 layers: keys 0.00126 to 0.00138",
        "refuses",
        "does not know the modelopt dialect",
        "vLLM",
        "0.33.0",
    ):
        assert expected in text, expected


def test_faults_lead_to_lint() -> None:
    fault = Fault("missing-shard", "x", "gone")
    text = Page(render_inspection(replace(empty(), faults=(fault, fault)))).text
    assert "2 faults found: `blockscale lint` explains them" in text


def test_names_are_escaped_everywhere() -> None:
    weird = replace(
        empty(EVIL),
        dialect=EVIL,
        architecture=EVIL,
        producer=EVIL,
        recipe=EVIL,
        layers=(linear(EVIL, EVIL),),
        kept=(Kept(EVIL, EVIL, (3,), 5, EVIL),),
        kv_cache=KVCache(EVIL, 1, Range(1.0, 2.0), None),
        engines=(Verdict(EVIL, False, EVIL, EVIL, EVIL),),
        notices=(EVIL,),
    )
    html = render_inspection(weird)
    page = Page(html)
    assert "script" not in page.tags
    assert "<script" not in html
    assert page.text.count("alert(") >= 12


def test_nothing_is_fetched_from_elsewhere() -> None:
    html = render_inspection(inspect_folder(GOLDEN / NAME))
    assert not re.search(r"https?:|//\w|url\(|@import|<script|<link|<img|<iframe", html)


def test_light_dark_print_small_screens_and_keyboard() -> None:
    html = render_inspection(inspect_folder(GOLDEN / NAME))
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html
    assert 'name="viewport"' in html
    assert html.count('class="scroll" tabindex="0"') == html.count("<table") == 4
    assert html.count("--k7:") == 3


def test_long_tables_are_cut() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = [f"{a}{b}" for a in letters for b in letters]
    long = replace(
        empty(), layers=tuple(map(linear, names)), kept=tuple(Kept(n, "bf16", (3,), 6, "norm") for n in names)
    )
    text = Page(render_inspection(long)).text
    assert f"The first {MAX_ROWS} of 676 rows" in text
    assert f"676 tensors that belong to no quantized layer; the first {MAX_ROWS} of 676 rows" in text
    assert "zz" not in text


@pytest.mark.parametrize("name", golden_names())
def test_shares_fill_the_bar(name: str) -> None:
    """All but the scales of the cache."""
    found = inspect_folder(GOLDEN / name)
    parts = shares(found)
    assert all(start == pytest.approx(sum(p[2] for p in parts[:i])) for i, (_, start, _, _) in enumerate(parts))
    in_cache = found.num_bytes - sum(total.num_bytes for total, *_ in parts)
    assert sum(part[2] for part in parts) == pytest.approx(100 * (1 - in_cache / found.num_bytes))


def test_write(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "page.html"
    found = inspect(GOLDEN / NAME, report=path)
    assert path.read_text(encoding="utf-8") == render_inspection(found)
    assert [p.name for p in path.parent.iterdir()] == ["page.html"]
    with pytest.raises(OutputError, match="cannot write"):
        write_inspection(found, tmp_path / "sub")


def test_half_a_surrogate_pair_in_a_name(tmp_path: Path) -> None:
    write_inspection(replace(empty(), layers=(linear("a\ud800b"),)), tmp_path / "page.html")
    assert "a\\ud800b" in (tmp_path / "page.html").read_text(encoding="utf-8")
