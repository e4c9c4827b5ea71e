"""A GPU below its TDP: slower where arithmetic binds, within what one system that ran so gave."""

from dataclasses import replace

import pytest

from blockscale.errors import UsageError
from blockscale.planning.hardware.catalogue import Gpu, find_gpu
from blockscale.planning.hardware.power_limit import with_power_limit
from blockscale.planning.money.assumptions import limited, load_assumptions
from blockscale.planning.planner import plan
from blockscale.planning.speed.predict import Workload, predict
from tests.planning.test_predict import published, rows


def h200(watts: float | None) -> Gpu:
    return with_power_limit(find_gpu("h200"), watts, 0.18, 0.68)


def test_the_clock() -> None:
    """500 of 700 W, of which 126 W are drawn without work: 0.652 of the rest."""
    whole, less = h200(None).peak("fp8"), h200(500).peak("fp8")
    assert less.value / whole.value == pytest.approx(0.652**0.5, rel=1e-3)
    assert less.low / whole.low == pytest.approx(0.652, rel=1e-3)
    assert less.high / whole.high == pytest.approx(0.652 ** (1 / 3), rel=1e-3)
    assert h200(610).bandwidth.value == h200(None).bandwidth.value  # reading draws 602 W
    assert h200(500).bandwidth.value / h200(None).bandwidth.value == pytest.approx(374 / 476)
    assert h200(500).bandwidth.high == h200(None).bandwidth.high
    assert h200(500).name == "H200 SXM at 500 W"
    assert h200(700) == h200(900) == h200(None)


def test_the_system_that_ran_so_lies_inside() -> None:
    row = next(row for row in rows() if row["id"] == "D15")
    d = published(row)
    work = Workload(round(float(row["isl_mean"])), round(float(row["osl_mean"])))
    measured = float(row["out_tok_s_per_gpu"])
    found = predict(replace(d, gpu=h200(500)), work).tokens_per_s_per_gpu
    assert found.low < measured < found.high
    assert found.value < predict(d, work).tokens_per_s_per_gpu.value


def test_what_reading_memory_binds_keeps_its_speed_while_its_power_is_there() -> None:
    def itl_ms(watts: float | None) -> float:
        found = plan("llama-3.1-70b", gpu="h200", format="fp8", concurrency=1, power_limit=watts).itl_ms
        assert found is not None
        return found.value

    assert itl_ms(610) == pytest.approx(itl_ms(None), rel=0.02)
    assert itl_ms(500) > 1.1 * itl_ms(None)
    busy = plan("llama-3.1-70b", gpu="h200", format="fp8", power_limit=500)
    free = plan("llama-3.1-70b", gpu="h200", format="fp8")
    assert busy.itl_ms is not None
    assert free.itl_ms is not None
    assert busy.itl_ms.value > 1.1 * free.itl_ms.value


def test_what_draws_more_than_the_limit_saves_no_energy() -> None:
    plans = [plan("llama-3.1-70b", gpu="h200", format="fp8", concurrency=1, power_limit=w) for w in (None, 400, 250)]
    joules = [one.joules_per_output_token.value for one in plans if one.joules_per_output_token is not None]
    costs = [one.cost_per_million_tokens.value for one in plans if one.cost_per_million_tokens is not None]
    assert joules == sorted(joules)
    assert costs == sorted(costs)
    assert len(joules) == len(costs) == 3


def test_boards_stay_at_the_limit_and_the_plan_says_so() -> None:
    result = plan("llama-3.1-70b", gpu="h200", format="fp8", power_limit=500, compare=["nvfp4@h200"])
    for one in (result, *result.compared):
        assert one.bill.power is not None
        assert one.bill.power.board_watts.high <= 500
        assert one.choice.gpu.name.endswith("at 500 W")
    data = result.to_dict()
    assert any("limited to 500 W" in notice for notice in data["notices"])
    record = next(record for record in data["assumptions"] if record["key"] == "gpu_power_limit_watts")
    assert (record["value"], record["origin"]) == (500, "option")


def test_a_search_has_the_limit_too() -> None:
    found = plan("llama-3.1-8b", gpu="h200", itl_ms=30, ttft_ms=500, power_limit=400).search
    assert found is not None
    assert all(one.choice.gpu.name.endswith("at 400 W") for one in found.found)


@pytest.mark.parametrize("watts", [0.0, -5.0, float("nan"), float("inf"), 100.0])
def test_no_limit_to_work_at(watts: float) -> None:
    with pytest.raises(UsageError, match="--power-limit"):
        plan("llama-3.1-8b", gpu="h200", power_limit=watts)
    with pytest.raises(UsageError, match="its power is not known"):
        with_power_limit(replace(find_gpu("h200"), tdp_watts=None), 500, 0.18, 0.68)
    assert limited(load_assumptions(), None) == load_assumptions()
