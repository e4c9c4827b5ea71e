"""Cost by hand, taxes by known multipliers, and the file of assumptions with everything that can be wrong in it."""

from dataclasses import replace
from pathlib import Path

import pytest

from blockscale.errors import UsageError
from blockscale.planning.hardware.catalogue import Figure, find_gpu
from blockscale.planning.money.assumptions import Assumptions, countries, load_assumptions, records_for, to_yaml
from blockscale.planning.money.cost import (
    PARTS,
    Cost,
    cost,
    electricity_per_million_tokens,
    has_price,
    landed_multiplier,
    purchase,
    yearly,
)
from blockscale.planning.money.energy import power
from blockscale.planning.speed.predict import Workload, predict
from tests.planning.test_predict import llama

WORK = Workload(1024, 1024, 64)


def spent(a: Assumptions | None = None, gpu: str = "b200", fmt: str = "nvfp4", work: Workload = WORK) -> Cost:
    d = llama(gpu, fmt)
    return cost(d, predict(d, work), a)


def test_taxes_of_brazil() -> None:
    brazil = load_assumptions(country="br")
    assert landed_multiplier(brazil) == pytest.approx(1.363, abs=5e-4)
    assert landed_multiplier(replace(brazil, redata=True)) == pytest.approx(1.220, abs=5e-4)
    assert landed_multiplier(replace(brazil, import_duty_share=0.16)) == pytest.approx(1.558, abs=5e-4)
    assert not brazil.redata
    # REDATA suspends the duty, too, and IPI is charged on price and duty
    assert landed_multiplier(replace(brazil, redata=True, import_duty_share=0.16)) == pytest.approx(1 / 0.82)
    ipi = replace(brazil, import_duty_share=0.1, excise_share=0.05)
    assert landed_multiplier(ipi) == pytest.approx((1 + 0.1 + 1.1 * 0.05 + 0.1175) / 0.82)


def test_other_countries() -> None:
    assert set(countries()) == {"US", "EU", "BR"}
    assert landed_multiplier(load_assumptions()) == 1.0
    europe = load_assumptions(country="EU")
    assert landed_multiplier(europe) == pytest.approx(1.21)
    assert purchase(find_gpu("b200"), 8, europe).taxes == 0  # a company deducts VAT
    body = purchase(find_gpu("b200"), 8, replace(europe, recoverable_share=0.0))
    assert body.taxes == pytest.approx(0.21 * (body.price + body.freight))


def test_landed_price_by_hand() -> None:
    a = replace(load_assumptions(country="BR"), purchase_usd_per_gpu={"b200": Figure(50_000.0, 50_000.0, 50_000.0)})
    bought = purchase(find_gpu("b200"), 8, a)
    assert bought.price == pytest.approx(8 * 50_000 * 1.1 * 5.4)
    assert bought.total == pytest.approx(bought.price * 1.02 * 1.1175 / 0.82)
    assert bought.estimate.low <= bought.total <= bought.estimate.high


def test_cost_by_hand() -> None:
    a = replace(
        load_assumptions(),
        purchase_usd_per_gpu={"b200": Figure(50_000.0, 50_000.0, 50_000.0)},
        network_share_of_price=0.0,
        freight_insurance_share=0.0,
        residual_share=0.0,
        life_years=4.0,
        utilization_share=0.5,
        opex_share_per_year=0.1,
        hosting_usd_per_kw_month=0.0,
        electricity_per_kwh=0.1,
    )
    d = llama()
    p = predict(d, WORK)
    found, watts = cost(d, p, a), power(d, p, a)
    tokens = p.tokens_per_s_per_gpu.value * 3600 * 0.5
    kw = 1.3 * (watts.wall_watts.value + watts.idle_wall_watts) / 2 / 1e3
    assert found.tokens_per_hour == pytest.approx(tokens)
    assert found.parts["hardware"] == pytest.approx(50_000 / (4 * 8760) / tokens * 1e6)
    assert found.parts["operation"] == pytest.approx(5_000 / 8760 / tokens * 1e6)
    assert found.parts["energy"] == pytest.approx(kw * 0.1 / tokens * 1e6)
    assert found.parts["taxes"] == 0
    assert found.per_million_tokens.value == pytest.approx(sum(found.parts.values()))
    assert found.per_hour.value == pytest.approx(found.per_million_tokens.value * tokens / 1e6)
    assert found.kwh_per_million_tokens == pytest.approx(kw / tokens * 1e6)


def test_electricity_of_a_joule() -> None:
    assert electricity_per_million_tokens(1.0, 1.3, 0.45) == pytest.approx(0.1625)


def test_interest_makes_payments_that_repay() -> None:
    a = replace(load_assumptions(), interest_share_per_year=0.1, life_years=5.0)
    payment = yearly(1000.0, 100.0, a)
    worth = sum(payment / 1.1**year for year in range(1, 6)) + 100 / 1.1**5
    assert worth == pytest.approx(1000)
    assert yearly(1000.0, 100.0, replace(a, interest_share_per_year=1e-9)) == pytest.approx(180, rel=1e-6)
    assert yearly(1000.0, 100.0, replace(a, interest_share_per_year=0.0)) == 180


def test_an_interval_holds_speed_and_price() -> None:
    found, p = spent(), predict(llama(), WORK).tokens_per_s_per_gpu
    assert set(found.parts) == set(PARTS)
    each = found.per_million_tokens
    assert each.low < each.value * p.value / p.high
    assert each.high > each.value * p.value / p.low
    certain = {"b200": Figure(61_500.0, 61_500.0, 61_500.0)}
    narrow = spent(replace(load_assumptions(), purchase_usd_per_gpu=certain)).per_million_tokens
    assert narrow.low == pytest.approx(narrow.value * p.value / p.high)
    assert narrow.high == pytest.approx(narrow.value * p.value / p.low)


def test_directions() -> None:
    a, base = load_assumptions(), spent().per_million_tokens.value
    assert spent(replace(a, utilization_share=0.35)).per_million_tokens.value > 1.8 * base
    assert spent(replace(a, life_years=3.0)).per_million_tokens.value > base
    assert spent(replace(a, electricity_per_kwh=0.3)).per_million_tokens.value > base
    assert spent(fmt="fp8").per_million_tokens.value > base
    assert spent(load_assumptions(country="BR")).parts["taxes"] > 0
    assert spent(work=Workload(1024, 1024, rate=0.01)).per_million_tokens.value > 50 * base


def test_rental() -> None:
    a = replace(load_assumptions(), acquisition="rental")
    found = spent(a)
    assert found.purchase is None
    assert found.per_hour.value == pytest.approx(2.90)
    assert found.parts["energy"] == found.parts["operation"] == 0
    assert found.per_month.value == pytest.approx(2.90 * 730)
    assert spent(replace(a, rental_tax_share=0.4)).per_hour.value == pytest.approx(2.90 * 1.4)


def test_owning_costs_about_what_owners_say() -> None:
    """An hour of a neocloud's own B200 is 2.34 dollars in the price book."""
    assert spent().per_hour.value == pytest.approx(2.34, rel=0.2)


def test_an_unknown_price_says_what_to_set() -> None:
    a = load_assumptions()
    assert not has_price(find_gpu("mi355x"), a)
    assert has_price(find_gpu("mi355x"), replace(a, acquisition="rental"))
    with pytest.raises(UsageError, match="no purchase price of MI355X is known") as caught:
        spent(a, "mi355x")
    assert "purchase_usd_per_gpu: {mi355x: ...}, or acquisition: rental" in caught.value.hint


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_wins_over_country_and_defaults(tmp_path: Path) -> None:
    text = """
country: BR
electricity_per_kwh: 0.38
life_years: {value: 4, date: 2026-05-01, source: our accountants}
purchase_usd_per_gpu: {H200: 31000, b200: {value: 50000, low: 45000, high: 55000}, my-gpu.toml: 9000}
"""
    a = load_assumptions(written(tmp_path, text))
    assert (a.country, a.currency, a.electricity_per_kwh, a.life_years) == ("BR", "BRL", 0.38, 4)
    assert a.purchase_usd("h200") == Figure(31000.0, 31000.0, 31000.0)
    assert a.purchase_usd("b200") == Figure(50000.0, 45000.0, 55000.0)
    assert a.purchase_usd("my-gpu") == Figure(9000.0, 9000.0, 9000.0)
    assert a.purchase_usd("gb200") == load_assumptions().purchase_usd("gb200")
    origins = {record.key: (record.origin, record.source) for record in a.records}
    assert origins["life_years"] == ("file", "our accountants")
    assert origins["inside_tax_share"][0] == "country"
    assert origins["pue_air"][0] == "default"


def test_every_default_is_dated_and_sourced_and_valid(tmp_path: Path) -> None:
    for country in countries():
        a = load_assumptions(country=country)
        assert all(record.date and record.source for record in a.records)
        again = load_assumptions(written(tmp_path, to_yaml(a)))
        assert replace(again, records=()) == replace(a, records=())
    assert load_assumptions().records == load_assumptions().records


def test_a_file_changes_nothing_for_the_next_one(tmp_path: Path) -> None:
    before = load_assumptions()
    load_assumptions(written(tmp_path, "purchase_usd_per_gpu: {h200: 1000}"))
    assert load_assumptions() == before


def test_only_what_a_plan_rests_on_is_printed() -> None:
    a = load_assumptions()
    keys = [record.key for record in records_for(a, ("b200",))]
    assert "purchase_usd_per_gpu.b200" in keys
    assert not {"purchase_usd_per_gpu.h200", "rental_usd_per_gpu_hour.b200"} & set(keys)
    rented = [record.key for record in records_for(replace(a, acquisition="rental"), ("b200",))]
    assert "rental_usd_per_gpu_hour.b200" in rented


def test_an_empty_file_is_no_change(tmp_path: Path) -> None:
    assert load_assumptions(written(tmp_path, "# nothing\n")) == load_assumptions()


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("life_year: 4", "unknown key 'life_year'", "nearest: life_years"),
        ("zzzz: 4", "unknown key 'zzzz'", "keys: "),
        ("life_years: 0", "life_years is 0", "a positive number"),
        ("life_years: yes", "life_years is True", "a positive number"),
        ("life_years: .nan", "life_years is nan", "a positive number"),
        ("life_years: {value: 4, when: now}", "unknown field 'when'", "date"),
        ("inside_tax_share: 18", "inside_tax_share is 18", "a share"),
        ("utilization_share: 0", "utilization_share is 0", "a share above 0"),
        ("pue_air: 0.9", "pue_air is 0.9", "from 1"),
        ("redata: 1", "redata is 1", "true or false"),
        ("redata: true", "redata is Brazil's", "country: BR"),
        ("country: EU\nredata: true", "the country is EU", "country: BR"),
        ("electricity_per_kwh: 90", "or 90 US dollars", "not a MWh"),
        ("country: BR\nelectricity_per_kwh: 450", "450 BRL, or 83.3 US dollars", "not a MWh"),
        ("life_years: 60", "life_years is 60", "not months"),
        ("air_rack_kw: 30000", "air_rack_kw is 30000", "not watts"),
        ("network_share_of_price: 10", "is 10", "0.1 for 10 %"),
        ("import_duty_share: 16", "is 16", "0.16 for 16 %"),
        ("purchase_usd_per_gpu: {h200: 31}", "h200 is 31", "US dollars for one GPU"),
        ("rental_usd_per_gpu_hour: {h200: 1400}", "h200 is 1400", "GPU and hour"),
        ("cooling: fan", "cooling is 'fan'", "auto, air, liquid"),
        ("currency: [1]", "currency is", "three letters"),
        ("currency: EUR", "currency is EUR", "set currency_per_usd and electricity_per_kwh"),
        ("gpu_power_limit_watts: -5", "gpu_power_limit_watts is -5", "null"),
        ("gpus_per_server: 1.5", "gpus_per_server is 1.5", "whole"),
        ("purchase_usd_per_gpu: 5", "no table of GPUs", "h200"),
        ("purchase_usd_per_gpu: {h20o: 5}", "no GPU 'h20o'", "h200"),
        ("purchase_usd_per_gpu: {h200: -5}", "h200 is -5", "positive"),
        ("purchase_usd_per_gpu: {h200: {value: 5, low: 6, high: 7}}", "h200 is", "positive"),
        ("rental_usd_per_gpu_hour: {h200: {value: 2, low: 1, high: 3}}", "h200 is", "positive"),
        ("country: XX", "no profile of country 'XX'", "BR (Brazil)"),
        ("country: 3", "country is no code", "BR"),
        ("- 1", "got list", "guide"),
        ("a: b: c", "not valid YAML", "a line"),
    ],
)
def test_files_that_make_no_sense(tmp_path: Path, text: str, what: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_assumptions(written(tmp_path, text))
    assert what in str(caught.value)
    assert hint in caught.value.hint


def test_other_trouble(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_assumptions(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"currency: \xff\n")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_assumptions(tmp_path / "latin.yaml")
    with pytest.raises(UsageError, match=r"--country US, and .* says BR"):
        load_assumptions(written(tmp_path, "country: BR"), "US")
    assert load_assumptions(written(tmp_path, "country: br"), "BR").currency == "BRL"
