"""What energy and cost assume: every figure with its date and source, settable in one YAML file.

    country: BR                                   # a profile under everything else
    electricity_per_kwh: 0.38                     # in the country's currency
    life_years: {value: 4, date: 2026-05, source: our accountants}
    purchase_usd_per_gpu: {h200: 31000, b200: {value: 50000, low: 45000, high: 55000}}

Package defaults, then the country's profile, then the user's file: the later wins.
"""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from blockscale.errors import UsageError
from blockscale.planning.hardware.catalogue import Figure, catalogue, find_gpu
from blockscale.planning.money.checks import PRICES, check_price, check_size, check_tariff, positive, what_is_wrong

DEFAULT_COUNTRY = "US"


@dataclass(frozen=True)
class Record:
    """One assumption as it is printed. `origin`: default, country, file or option."""

    key: str
    value: Any
    date: str
    source: str
    origin: str


@dataclass(frozen=True)
class Assumptions:
    """Every key of the file; `_share` is a fraction, `_usd` are US dollars, other money is in `currency`."""

    gpu_power_limit_watts: float | None
    gpu_idle_share: float
    memory_power_share: float
    compute_power_share: float
    communication_power_share: float
    server_watts_per_gpu: float
    server_share_of_tdp: float
    fan_share_air: float
    fan_share_liquid: float
    power_supply_efficiency_share: float
    cooling: str
    pue_air: float
    pue_liquid: float
    air_rack_kw: float
    liquid_rack_kw: float
    gpus_per_server: int
    acquisition: str
    rental_tier: str
    network_share_of_price: float
    life_years: float
    residual_share: float
    interest_share_per_year: float
    utilization_share: float
    opex_share_per_year: float
    hosting_usd_per_kw_month: float
    currency: str
    currency_per_usd: float
    electricity_per_kwh: float
    freight_insurance_share: float
    import_duty_share: float
    excise_share: float
    federal_contributions_share: float
    inside_tax_share: float
    sales_tax_share: float
    recoverable_share: float
    redata: bool
    rental_tax_share: float
    purchase_usd_per_gpu: Mapping[str, Figure]
    rental_usd_per_gpu_hour: Mapping[str, float]
    country: str
    records: tuple[Record, ...]

    def purchase_usd(self, gpu_key: str) -> Figure | None:
        """Price of a GPU with its share of the server; None where no price is known."""
        return self.purchase_usd_per_gpu.get(gpu_key)

    def rental_usd_per_hour(self, gpu_key: str) -> float | None:
        return self.rental_usd_per_gpu_hour.get(gpu_key)


_KEYS = tuple(f.name for f in fields(Assumptions) if f.name not in ("records", "country"))


def load_assumptions(
    path: str | Path | None = None, country: str | None = None, described: tuple[str, ...] = ()
) -> Assumptions:
    """Defaults, a country's profile and the user's file, merged. UsageError for what is unknown or makes no sense.

    described  keys of GPUs that files describe, which may have prices, too
    """
    own = {} if path is None else _read(Path(path))
    named = own.pop("country", None)
    if named is not None and not isinstance(named, str):
        raise UsageError(f"{path}: country is no code", hint=_countries_hint())
    if country is not None and named is not None and country.upper() != named.upper():
        raise UsageError(f"--country {country}, and {path} says {named}", hint="leave one of them out")
    code = _country_code(country or named or DEFAULT_COUNTRY)
    records = {key: _record(key, entry, "default") for key, entry in _defaults().items()}
    records |= {key: _record(key, entry, "country") for key, entry in _countries()[code].items() if key != "name"}
    given = {key: _checked(key, entry, str(path), described) for key, entry in own.items()}
    _check_currency(given, records, str(path))
    if "redata" in given and given["redata"].value and code != "BR":
        raise UsageError(f"{path}: redata is Brazil's, and the country is {code}", hint="country: BR, or leave it out")
    records |= {key: record for key, record in given.items() if key not in PRICES}
    check_tariff({key: record.value for key, record in records.items()}, str(path))
    tier = records["rental_tier"].value
    tables = {PRICES[0]: _purchases(), PRICES[1]: _rentals(tier)}
    for key, table in tables.items():
        for gpu, price in given[key].value.items() if key in given else ():
            table[gpu] = replace(given[key], key=f"{key}.{gpu}", value=price)
    values: dict[str, Any] = {key: record.value for key, record in records.items()}
    for key, table in tables.items():
        values[key] = {gpu: record.value for gpu, record in table.items()}
    shown = (*records.values(), *(record for table in tables.values() for record in table.values()))
    return Assumptions(**values, country=code, records=shown)


def limited(assumptions: Assumptions, watts: float | None) -> Assumptions:
    """Under the limit of `--power-limit`, which wins over the file's; None: as they are."""
    if watts is None:
        return assumptions
    key = "gpu_power_limit_watts"
    wrong = what_is_wrong(key, watts)
    if wrong:
        raise UsageError(f"--power-limit {watts}", hint=wrong.replace(" or null", ""))
    own = Record(key, watts, "", "--power-limit", "option")
    records = tuple(own if record.key == key else record for record in assumptions.records)
    return replace(assumptions, gpu_power_limit_watts=watts, records=records)


def countries() -> tuple[str, ...]:
    """Codes that have a profile."""
    return tuple(_countries())


def records_for(assumptions: Assumptions, gpu_keys: tuple[str, ...]) -> tuple[Record, ...]:
    """Those that a plan for these GPUs rests on: without the prices of others, and of what is not chosen."""
    unused = PRICES[0] if assumptions.acquisition == "rental" else PRICES[1]
    wanted = {f"{key}.{gpu}" for key in PRICES if key != unused for gpu in gpu_keys}
    return tuple(r for r in assumptions.records if "." not in r.key or r.key in wanted)


def to_yaml(assumptions: Assumptions) -> str:
    """All of them in the form of the file, to start one's own from."""
    lines = [f"country: {assumptions.country}"]
    for r in assumptions.records:
        if "." not in r.key:
            entry = {"value": r.value, "date": r.date, "source": r.source}
            flow = yaml.safe_dump(entry, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True)
            lines.append(f"{r.key}: {flow.strip()}")
    for key in PRICES:
        lines.append(f"{key}:")
        for r in assumptions.records:
            if r.key.startswith(key + "."):
                figure = r.value
                plain = (
                    {"value": figure.value, "low": figure.low, "high": figure.high}
                    if isinstance(figure, Figure)
                    else figure
                )
                flow = yaml.safe_dump(plain, default_flow_style=True, sort_keys=False).replace("\n...", "").strip()
                lines.append(f"  {r.key.removeprefix(key + '.')}: {flow}  # {r.date}: {r.source}")
    return "\n".join(lines) + "\n"


def _country_code(name: str) -> str:
    if name.upper() in _countries():
        return name.upper()
    raise UsageError(f"no profile of country '{name}'", hint=_countries_hint())


def _countries_hint() -> str:
    listed = ", ".join(f"{code} ({entry['name']})" for code, entry in _countries().items())
    return f"profiles: {listed}; for others set currency, electricity and taxes in --assumptions"


def _read(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageError(f"{path}: cannot be read: {e.strerror or e}", hint="check the path") from e
    except UnicodeDecodeError as e:
        raise UsageError(f"{path}: not UTF-8", hint="convert it with iconv") from e
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        problem = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise UsageError(f"{path}: not valid YAML: {problem}", hint="one `key: value` a line") from e
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UsageError(
            f"{path}: expected `key: value` lines, got {type(data).__name__}", hint="see the guide of plan"
        )
    for key in data:
        if key not in _KEYS and key != "country":
            near = difflib.get_close_matches(str(key), _KEYS, 1, 0.4)
            raise UsageError(
                f"{path}: unknown key '{key}'", hint=f"nearest: {near[0]}" if near else "keys: " + ", ".join(_KEYS)
            )
    return data


def _checked(key: str, entry: Any, where: str, described: tuple[str, ...]) -> Record:
    """The user's value, of the right kind and of a size that its unit can have."""
    if key in PRICES:
        return _price_table(key, entry, where, described)
    record = _record(key, entry, "file")
    wrong = what_is_wrong(key, record.value)
    if wrong:
        raise UsageError(f"{where}: {key} is {record.value!r}", hint=f"{key}: {wrong}")
    check_size(key, record.value, where)
    return record


def _price_table(key: str, entry: Any, where: str, described: tuple[str, ...]) -> Record:
    if not isinstance(entry, Mapping) or not entry:
        raise UsageError(
            f"{where}: {key} is no table of GPUs", hint=f"{key}: {{h200: {31000 if 'purchase' in key else 1.6}}}"
        )
    prices: dict[str, Any] = {}
    for name, value in entry.items():
        gpu = _priced_gpu(str(name), where, key, described)
        is_range = isinstance(value, Mapping) and set(value) == {"value", "low", "high"}
        numbers = [value[n] for n in ("low", "value", "high")] if is_range and key == PRICES[0] else [value]
        if any(positive(number) for number in numbers) or numbers != sorted(numbers):
            raise UsageError(
                f"{where}: {key}.{name} is {value!r}", hint="a positive number, or value, low and high of a purchase"
            )
        ends = [float(number) for number in numbers]
        check_price(key, min(ends), max(ends), f"{where}: {key}.{name}")
        prices[gpu] = Figure(ends[len(ends) // 2], ends[0], ends[-1]) if key == PRICES[0] else ends[0]
    return Record(key, prices, "", "your file", "file")


def _priced_gpu(name: str, where: str, key: str, described: tuple[str, ...]) -> str:
    """Key of a GPU in a table of prices: of the catalogue, or of a file that describes it."""
    if name in catalogue() or name in described:
        return name
    if name.endswith(".toml"):
        return Path(name).stem
    try:
        return find_gpu(name).key
    except UsageError as e:
        raise UsageError(
            f"{where}: {key}: {e}", hint=f"{e.hint}; one of a file (--gpu my.toml) by its key: my, or the table's name"
        ) from e


def _record(key: str, entry: Any, origin: str) -> Record:
    if isinstance(entry, Mapping) and "value" in entry:
        extra = set(entry) - {"value", "date", "source"}
        if extra:
            name = str(min(map(str, extra)))
            raise UsageError(f"{key}: unknown field '{name}'", hint="value, date and source")
        source = str(entry.get("source", "your file" if origin == "file" else ""))
        return Record(key, entry["value"], str(entry.get("date", "")), source, origin)
    return Record(key, entry, "", "your file", origin)


def _check_currency(given: Mapping[str, Record], records: Mapping[str, Record], where: str) -> None:
    """Another currency makes the profile's rate and tariff meaningless."""
    if "currency" not in given or given["currency"].value == records["currency"].value:
        return
    missing = [key for key in ("currency_per_usd", "electricity_per_kwh") if key not in given]
    if missing:
        raise UsageError(
            f"{where}: currency is {given['currency'].value}, and {' and '.join(missing)} is of another",
            hint="set " + " and ".join(missing),
        )


@cache
def _defaults() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(_shipped("assumptions.yaml"))
    return data


@cache
def _countries() -> dict[str, dict[str, Any]]:
    return tomllib.loads(_shipped("countries.toml"))


@cache
def _prices() -> dict[str, dict[str, Any]]:
    return tomllib.loads(_shipped("prices.toml"))


def _shipped(name: str) -> str:
    return resources.files("blockscale.planning.money").joinpath(name).read_text(encoding="utf-8")


def _purchases() -> dict[str, Record]:
    found = {gpu: entry["purchase_usd"] for gpu, entry in _prices().items() if "purchase_usd" in entry}
    return {
        gpu: Record(
            f"{PRICES[0]}.{gpu}",
            Figure(float(price["value"]), float(price["low"]), float(price["high"])),
            price["date"],
            f"{price['source']} (confidence: {price['confidence']})",
            "default",
        )
        for gpu, price in found.items()
    }


def _rentals(tier: str) -> dict[str, Record]:
    found = {gpu: entry["rental_usd_per_hour"] for gpu, entry in _prices().items() if "rental_usd_per_hour" in entry}
    source = f"InferenceX price book, {tier.replace('_', ' ')}"
    return {
        gpu: Record(f"{PRICES[1]}.{gpu}", float(price[tier]), "2026-04", source, "default")
        for gpu, price in found.items()
    }
