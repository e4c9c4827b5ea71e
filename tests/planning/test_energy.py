"""Power against what was measured at the wall, and how it moves with load, limits and cooling."""

import math
from dataclasses import replace

import pytest

from blockscale.errors import UsageError
from blockscale.planning.hardware.catalogue import find_gpu
from blockscale.planning.money.assumptions import Assumptions, load_assumptions
from blockscale.planning.money.energy import (
    Power,
    cooling_of,
    joules_per_output_token,
    power,
    racks,
    ratio,
    served_tokens_per_s,
)
from blockscale.planning.speed.predict import Estimate, Workload, predict
from tests.planning.test_predict import llama, predicted, published, rows

# D15 ran with `power_limit = 500`, as its configuration in MLPerf's results says, and D14 in a water-cooled server.
SETTINGS: dict[str, dict[str, float | str]] = {"D14": {"cooling": "liquid"}, "D15": {"gpu_power_limit_watts": 500.0}}


def measured() -> dict[str, tuple[float, Power]]:
    """Row -> (watts at the wall, predicted power)."""
    return {row["id"]: (float(row["system_power_W"]), at_wall(row)) for row in rows() if row["system_power_W"]}


def at_wall(row: dict[str, str], server_watts: float | None = None) -> Power:
    own = load_assumptions()
    if server_watts is not None:
        own = replace(own, server_watts_per_gpu=server_watts)
    return power(published(row), predicted(row)[0], replace(own, **SETTINGS.get(row["id"], {})))  # type: ignore[arg-type]


def test_wall_power_of_measured_systems() -> None:
    found = measured()
    assert sorted(found) == ["D13", "D14", "D15"]
    for name, (watts, p) in found.items():
        assert p.wall_watts.value == pytest.approx(watts, rel=0.12), name
        assert p.wall_watts.low < watts < p.wall_watts.high, name


def test_wall_power_of_a_system_that_the_fit_has_not_seen() -> None:
    """Each in turn, with what servers add taken from the two others."""
    a = load_assumptions()
    fans = {"air": a.fan_share_air, "liquid": a.fan_share_liquid}
    implied = {
        name: (watts * a.power_supply_efficiency_share / (1 + fans[p.cooling]) - p.board_watts.value) / p.num_gpus
        for name, (watts, p) in measured().items()
    }
    assert sum(implied.values()) / 3 == pytest.approx(a.server_watts_per_gpu, abs=10)
    for row in rows():
        if row["id"] in implied:
            others = [watts for name, watts in implied.items() if name != row["id"]]
            p = at_wall(row, sum(others) / 2)
            assert p.wall_watts.value == pytest.approx(float(row["system_power_W"]), rel=0.12), row["id"]


def test_the_most_that_eight_h100_were_seen_to_draw() -> None:
    """8.4 kW in training (Latif et al., IEEE Access 13, 2025): of a system that no figure was fitted to."""
    p = power(llama("h100", "fp8", "tp2dp4"), predict(llama("h100", "fp8", "tp2dp4"), Workload(1000, 1000)))
    assert p.board_watts.value == 8 * 700
    assert p.wall_watts.value == pytest.approx(8400, rel=0.12)


def test_measured_joules_per_token() -> None:
    row = next(row for row in rows() if row["id"] == "D13")
    joules = joules_per_output_token(at_wall(row), predicted(row)[0].tokens_per_s_per_gpu)
    assert joules.low < float(row["J_per_output_token"]) < joules.high
    assert joules.value == pytest.approx(float(row["J_per_output_token"]), rel=0.3)


def drawn(gpu: str = "b200", work: Workload | None = None, **settings: object) -> Power:
    d, work = llama(gpu), work or Workload(1024, 1024, 64)
    own: Assumptions = replace(load_assumptions(), **settings)  # type: ignore[arg-type]
    return power(d, predict(d, work), own)


def test_boards_stay_below_tdp_and_above_idle() -> None:
    for work in (Workload(1, 1000, 1), Workload(1024, 1024, 64), Workload(8192, 64)):
        p = drawn(work=work)
        assert 180 < p.board_watts.low <= p.board_watts.value <= p.board_watts.high <= 1000
    assert drawn(work=Workload(8192, 64)).is_limited
    assert not drawn(work=Workload(1, 1000, 1)).is_limited


def test_boundaries_contain_one_another() -> None:
    p = drawn()
    assert p.board_watts.value < p.wall_watts.value < p.facility_watts.value
    assert p.facility_watts.value == pytest.approx(p.wall_watts.value * 1.3)
    assert p.idle_wall_watts < p.wall_watts.low
    assert p.wall_watts.value == pytest.approx((p.board_watts.value + 170) * 1.08 / 0.95)
    assert p.watts("facility") == p.facility_watts
    with pytest.raises(UsageError, match="unknown boundary 'rack'"):
        p.watts("rack")


def test_more_load_draws_more_and_costs_less_energy_a_token() -> None:
    few, many = (drawn(work=Workload(1024, 1024, n)) for n in (1, 128))
    assert few.board_watts.value < many.board_watts.value
    joules = [
        joules_per_output_token(p, predict(llama(), Workload(1024, 1024, n)).tokens_per_s_per_gpu).value
        for p, n in ((few, 1), (many, 128))
    ]
    assert joules[1] < joules[0] / 10


def test_a_rate_that_leaves_gpus_standing_still_draws_less() -> None:
    rare, work = Workload(100, 100, rate=0.01), Workload(100, 100, 1)
    d = llama()
    assert power(d, predict(d, rare)).board_watts.value < drawn(work=work).board_watts.value
    assert served_tokens_per_s(d, predict(d, rare)) == Estimate(1.0, 1.0, 1.0)
    swamped = Workload(1000, 1000, rate=50.0)
    assert served_tokens_per_s(d, predict(d, swamped)).value < 50_000


def test_stages_that_stand_still_draw_little() -> None:
    """With one request, one of four stages works at a time."""
    staged = llama(layout="pp4")
    idle = 4 * 180
    few, many = (power(staged, predict(staged, Workload(1024, 1024, n))).board_watts.value for n in (1, 256))
    one = power(llama(), predict(llama(), Workload(1024, 1024, 1))).board_watts.value
    assert few - idle == pytest.approx(one - 180, rel=0.15)
    assert many > 2 * few


def test_replicas_that_stand_still_draw_little() -> None:
    one, four = llama(), llama(layout="tp1dp4")
    alone, spread = (power(d, predict(d, Workload(1024, 1024, 1))).board_watts.value for d in (one, four))
    assert spread - 4 * 180 == pytest.approx(alone - 180)


def test_a_power_limit_holds() -> None:
    p = drawn(gpu_power_limit_watts=400.0)
    assert p.is_limited
    assert p.board_watts.value == 400
    assert p.wall_watts.value < drawn().wall_watts.value
    assert drawn(gpu_power_limit_watts=5000.0).board_watts.value <= 1000


def test_cooling() -> None:
    a = load_assumptions()
    assert [cooling_of(find_gpu(name), a) for name in ("h200", "b200", "gb200", "mi355x")] == [
        *("air", "air", "liquid", "liquid")
    ]
    air, liquid = drawn(), drawn(cooling="liquid")
    assert liquid.wall_watts.value < air.wall_watts.value
    assert (air.pue, liquid.pue) == (1.3, 1.15)


def test_a_small_system_stays_below_its_nameplate() -> None:
    p = power(llama("dgx-spark"), predict(llama("dgx-spark"), Workload(1024, 128, 1)))
    assert 100 < p.wall_watts.value <= 240
    assert p.board_watts.high <= 140


def test_a_gpu_of_unknown_power() -> None:
    d = replace(llama(), gpu=replace(find_gpu("b200"), tdp_watts=None))
    with pytest.raises(UsageError, match="its power is not known") as caught:
        power(d, predict(d, Workload(1024, 1024, 1)))
    assert "tdp_watts" in caught.value.hint


@pytest.mark.parametrize(
    ("gpu", "num_gpus", "num_racks", "kw"),
    [("gb200", 72, 1, 120), ("gb200", 73, 2, 240), ("b200", 16, 1, 28.6), ("b200", 17, 2, 42.9), ("h200", 64, 4, 81.6)],
)
def test_racks(gpu: str, num_gpus: int, num_racks: int, kw: float) -> None:
    found = racks(find_gpu(gpu), num_gpus)
    assert (found.num_racks, found.kw.value) == (num_racks, pytest.approx(kw))
    assert found.gpus_per_rack == {"gb200": 72, "b200": 16, "h200": 16}[gpu]


def test_racks_of_a_limit_that_one_server_exceeds() -> None:
    tight = replace(load_assumptions(), air_rack_kw=10.0)
    with pytest.raises(UsageError, match=r"takes 14\.3 kW, and a rack gives 10 kW") as caught:
        racks(find_gpu("b200"), 8, tight)
    assert "air_rack_kw" in caught.value.hint
    assert racks(find_gpu("gb200"), 72).kw == Estimate(120.0, 120.0, 132.0)
    assert racks(find_gpu("b200"), 128, replace(tight, cooling="liquid")).num_racks == 2


def test_widths_of_a_ratio_add_in_square() -> None:
    one = Estimate(10.0, 10 / math.exp(0.3), 10 * math.exp(0.3))
    other = Estimate(5.0, 5 / math.exp(0.4), 5 * math.exp(0.4))
    found = ratio(one, other)
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2 / math.exp(0.5), 2 * math.exp(0.5)))
