"""Layouts as users write them, and those that no engine can build."""

import pytest

from blockscale.errors import UsageError
from blockscale.planning.models.architecture import from_config
from blockscale.planning.models.model import presets
from blockscale.planning.speed.layout import Layout, check_layout, parse_layout


@pytest.mark.parametrize(
    ("text", "layout", "gpus"),
    [
        ("tp8", Layout(8), 8),
        ("TP4PP2", Layout(4, 2), 8),
        ("tp4-pp2", Layout(4, 2), 8),
        ("dep8", Layout(1, 1, 8, True), 8),
        ("tep4", Layout(4, 1, 1, True), 4),
        ("tp2dp4", Layout(2, replicas=4), 8),
        ("dep4tp2", Layout(2, 1, 4, True), 8),
        ("tp1", Layout(), 1),
    ],
)
def test_layouts(text: str, layout: Layout, gpus: int) -> None:
    assert parse_layout(text) == layout
    assert layout.num_gpus == gpus
    assert parse_layout(layout.name) == layout


@pytest.mark.parametrize("text", ["", "8", "tp", "tp0", "tp8tp4", "fast", "tp2tep2", "dep2tep2", "tp8pp"])
def test_what_is_no_layout(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_layout(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("model", "layout", "what"),
    [
        ("llama-3.1-8b", "tp3", "does not divide 32 attention heads"),
        ("llama-3.1-8b", "dep8", "no experts"),
        ("llama-3.1-8b", "tp1pp64", "64 pipeline stages for 32 layers"),
        ("mixtral-8x7b", "dep16", "8 experts cannot be spread evenly over 16"),
    ],
)
def test_layouts_that_do_not_go_with_a_model(model: str, layout: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        check_layout(parse_layout(layout), from_config(presets()[model]))


def test_layouts_that_do() -> None:
    check_layout(parse_layout("dep8"), from_config(presets()["deepseek-r1"]))
    check_layout(parse_layout("tp8"), from_config(presets()["llama-3.1-70b"]))
