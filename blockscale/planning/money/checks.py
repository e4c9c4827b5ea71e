"""What a value of the assumptions must be: of the right kind, and of a size that its unit can have."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from blockscale.errors import UsageError

PRICES = ("purchase_usd_per_gpu", "rental_usd_per_gpu_hour")
Check = Callable[[Any], str]  # what is wrong with a value; empty: nothing


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _share(value: Any) -> str:
    return "" if _is_number(value) and 0 <= value <= 1 else "a share from 0 to 1"


def _positive_share(value: Any) -> str:
    return "" if _is_number(value) and 0 < value <= 1 else "a share above 0, up to 1"


def _part(value: Any) -> str:
    return "" if _is_number(value) and 0 <= value < 1 else "a share from 0 to below 1"


def _amount(value: Any) -> str:
    return "" if _is_number(value) and value >= 0 else "a number, 0 or more"


def positive(value: Any) -> str:
    return "" if _is_number(value) and value > 0 else "a positive number"


def _limit(value: Any) -> str:
    return "" if value is None else positive(value) and "a positive number or null"


def _pue(value: Any) -> str:
    return "" if _is_number(value) and 1 <= value <= 5 else "total over IT power, from 1 to 5"


def _whole(value: Any) -> str:
    return "" if isinstance(value, int) and not isinstance(value, bool) and value > 0 else "a positive whole number"


def _switch(value: Any) -> str:
    return "" if isinstance(value, bool) else "true or false"


def _currency(value: Any) -> str:
    is_code = isinstance(value, str) and len(value) == 3 and value.isalpha() and value.isupper()
    return "" if is_code else "a code of three letters, as BRL"


def _one_of(*known: str) -> Check:
    return lambda value: "" if value in known else "one of " + ", ".join(known)


# What a value must be, where its name does not say it all.
_CHECKS: dict[str, Check] = {
    "gpu_power_limit_watts": _limit,
    "compute_power_share": _amount,
    "power_supply_efficiency_share": _positive_share,
    "cooling": _one_of("auto", "air", "liquid"),
    "pue_air": _pue,
    "pue_liquid": _pue,
    "air_rack_kw": positive,
    "liquid_rack_kw": positive,
    "gpus_per_server": _whole,
    "acquisition": _one_of("purchase", "rental"),
    "rental_tier": _one_of("hyperscaler", "neocloud", "rental_3_years"),
    "network_share_of_price": _amount,
    "life_years": positive,
    "residual_share": _part,
    "utilization_share": _positive_share,
    "currency": _currency,
    "currency_per_usd": positive,
    "freight_insurance_share": _amount,
    "import_duty_share": _amount,
    "excise_share": _amount,
    "federal_contributions_share": _amount,
    "inside_tax_share": _part,
    "sales_tax_share": _amount,
    "redata": _switch,
    "rental_tax_share": _amount,
    "server_watts_per_gpu": _amount,
    "hosting_usd_per_kw_month": _amount,
    "electricity_per_kwh": _amount,
}


def what_is_wrong(key: str, value: Any) -> str:
    """Empty: nothing. A key without a check of its own is a share."""
    return _CHECKS.get(key, _share)(value)


# What no value of a key comes near, and the unit that it was probably taken for another of.
_MOST: dict[str, tuple[float, str]] = {
    "gpu_power_limit_watts": (20_000, "watts of one GPU's board"),
    "compute_power_share": (2, "a share of TDP: 1.0, not 100"),
    "server_watts_per_gpu": (20_000, "watts a GPU, not of the whole"),
    "air_rack_kw": (1_000, "kilowatts, not watts"),
    "liquid_rack_kw": (2_000, "kilowatts, not watts"),
    "gpus_per_server": (1_024, "GPUs in one server"),
    "network_share_of_price": (2, "a share of the price: 0.1 for 10 %"),
    "life_years": (30, "years, not months"),
    "hosting_usd_per_kw_month": (5_000, "US dollars for a kW and month"),
    "freight_insurance_share": (2, "a share of the price: 0.02 for 2 %"),
    "import_duty_share": (2, "a share of the value: 0.16 for 16 %"),
    "excise_share": (2, "a share of the value: 0.05 for 5 %"),
    "federal_contributions_share": (2, "a share of the value: 0.1175 for 11.75 %"),
    "sales_tax_share": (2, "a share of the value: 0.21 for 21 %"),
    "rental_tax_share": (2, "a share of the rent: 0.4 for 40 %"),
}
_MOST_USD_PER_KWH = 5.0
_PRICE_USD = {
    PRICES[0]: (100.0, 2e6, "US dollars for one GPU with its share of the server"),
    PRICES[1]: (0.01, 200.0, "US dollars for one GPU and hour"),
}


def check_size(key: str, value: Any, where: str) -> None:
    most, unit = _MOST.get(key, (math.inf, ""))
    if isinstance(value, int | float) and value > most:
        raise UsageError(f"{where}: {key} is {value:g}, more than any", hint=f"{key}: {unit}")


def check_tariff(values: Mapping[str, Any], where: str) -> None:
    """In the country's currency, whatever it is worth."""
    usd = values["electricity_per_kwh"] / values["currency_per_usd"]
    if usd > _MOST_USD_PER_KWH:
        raise UsageError(
            f"{where}: electricity_per_kwh is {values['electricity_per_kwh']:g} {values['currency']}, or {usd:.3g} US "
            "dollars",
            hint="electricity_per_kwh: money for a kWh, not a MWh; a tariff by the MWh is a thousand times as much",
        )


def check_price(key: str, low: float, high: float, where: str) -> None:
    """UsageError for what no GPU costs."""
    least, most, unit = _PRICE_USD[key]
    if not least <= low <= high <= most:
        raise UsageError(f"{where} is {low:g}, which is no price of one GPU", hint=f"{key}: {unit}")
