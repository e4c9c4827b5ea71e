import itertools
import math

import pytest

from blockscale.evaluation.charts import MAX_KINDS, bars, block_of, kind_of, layer_points, nice_ticks, shorten
from blockscale.evaluation.result import Interval, LayerError


def layer(name: str, sqnr: float) -> LayerError:
    return LayerError(name, "nvfp4", sqnr, 4.5, 100)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 37.6), (0.98, 1.02), (-3, 4), (0, 1e-7), (5, 5), (0, 0), (0, 9e9)]
)
def test_ticks_are_even_and_cover_the_range(low, high) -> None:
    ticks = nice_ticks(low, high)
    assert 2 <= len(ticks) <= 9
    assert ticks[0] <= low + 1e-9 * abs(low)
    assert ticks[-1] >= high * (1 - 1e-9)
    steps = [b - a for a, b in itertools.pairwise(ticks)]
    assert all(step == pytest.approx(steps[0]) for step in steps)


def test_bars_are_in_proportion() -> None:
    plot = bars([("a", [("candidate", Interval(10.0, 5.0, 20.0))]), ("b", [("candidate", Interval(5.0))])], str)
    a, b = plot.rows
    assert a.end - a.start == pytest.approx(2 * (b.end - b.start), abs=0.02)
    assert a.low < a.end < a.high
    assert (b.low, b.high) == (None, None)
    assert (a.text, b.text) == ("10.0", "5.0")
    assert [label for _, _, label in plot.labels] == ["a", "b"]
    assert plot.height > max(row.y for row in plot.rows)


def test_a_baseline_of_one_lies_within_the_plot() -> None:
    plot = bars([("a", [("candidate", Interval(0.99, 0.98, 1.01))])], str, baseline=1.0)
    assert plot.left <= plot.rows[0].end < plot.baseline <= plot.width


def test_what_is_not_finite_is_left_out() -> None:
    plot = bars([("a", [("candidate", Interval(math.nan))]), ("b", [("candidate", Interval(1.0))])], str)
    assert [label for _, _, label in plot.labels] == ["b"]
    assert bars([("a", [("candidate", Interval(math.inf))])], str) is None
    assert bars([], str) is None


def test_names_of_layers() -> None:
    assert block_of("model.layers.12.self_attn.q_proj") == 12
    assert block_of("lm_head") is None
    assert kind_of("model.layers.12.self_attn.q_proj.weight") == "q_proj"
    assert kind_of("model.layers.3.mlp.experts.7.up_proj") == "up_proj"
    assert kind_of("model.layers.3") == "layers"
    assert kind_of("weight") == "weight"


def test_experts_become_one_mark_with_a_range() -> None:
    plot = layer_points([layer(f"m.layers.0.experts.{e}.up_proj", 20.0 + e) for e in range(3)])
    (point,) = plot.points
    assert point.low > point.y > point.high  # SVG's y points down
    assert point.text == "up_proj in block 0: 21.0 dB, 3 layers, 20.0 to 22.0"


def test_many_kinds_share_the_last_mark() -> None:
    plot = layer_points([layer(f"m.layers.0.kind{i}", 20.0 + i) for i in range(12)])
    assert len(plot.kinds) == MAX_KINDS
    assert plot.kinds[-1] == "other"
    assert max(point.kind for point in plot.points) == MAX_KINDS - 1


def test_layers_outside_the_blocks_stand_apart() -> None:
    plot = layer_points([*(layer(f"m.layers.{i}.up_proj", 20.0) for i in range(4)), layer("lm_head", 30.0)])
    assert plot.points[-1].x > max(point.x for point in plot.points[:-1])
    assert plot.x_ticks[-1].label == "outside"


def test_no_layer_to_draw() -> None:
    assert layer_points([]) is None
    assert layer_points([layer("a", math.inf)]) is None


def test_shorten() -> None:
    assert shorten("abc", 3) == "abc"
    assert shorten("abcd", 3) == "ab…"
