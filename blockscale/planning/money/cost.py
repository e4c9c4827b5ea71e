"""Money: what a million output tokens cost, bought or rented, and where the money goes.

    hardware   = (landed price - what is left at the end of life) / life, or rent
    taxes      = what import and sales taxes add to the price, spread in the same way
    energy     = mean facility power x tariff: idle hours count
    operation  = support, spares, staff, and the place in a data center
    per token  = all this by the hour / tokens made in an hour on average

Import taxes are charged on one another. Brazil's ICMS is charged on a price that holds it ("por dentro"):

    landed = (CIF + II + IPI + PIS/COFINS) / (1 - ICMS)
"""

from collections.abc import Mapping
from dataclasses import dataclass

from blockscale.errors import UsageError
from blockscale.planning.hardware.catalogue import Figure, Gpu
from blockscale.planning.money.assumptions import Assumptions, load_assumptions
from blockscale.planning.money.energy import Power, power, ratio, served_tokens_per_s, server_kw
from blockscale.planning.speed.predict import Estimate, Prediction
from blockscale.planning.speed.roofline import Deployment

HOURS_PER_YEAR = 8760.0
HOURS_PER_MONTH = HOURS_PER_YEAR / 12
PARTS = ("hardware", "taxes", "energy", "operation")


@dataclass(frozen=True)
class Purchase:
    """What is paid before the first token, in the currency: price of GPUs, servers and network, freight, taxes.

    range  of the price, as factors
    """

    price: float
    freight: float
    taxes: float
    multiplier: float
    range: Figure

    @property
    def total(self) -> float:
        return self.price + self.freight + self.taxes

    @property
    def estimate(self) -> Estimate:
        """`total`, and its ends where sellers' prices differ."""
        return Estimate(self.total, self.total * self.range.low, self.total * self.range.high)


@dataclass(frozen=True)
class Cost:
    """All money in `currency`. Output tokens; the prompts' work is in them.

    parts      of `per_million_tokens`, by PARTS
    purchase   None for a rental, whose rent holds energy and operation
    """

    currency: str
    acquisition: str
    per_million_tokens: Estimate
    parts: Mapping[str, float]
    per_hour: Estimate
    tokens_per_hour: float
    kwh_per_million_tokens: float
    purchase: Purchase | None

    @property
    def per_month(self) -> Estimate:
        return self.per_hour.scaled(HOURS_PER_MONTH)

    @property
    def energy_share(self) -> float:
        """Of the whole; 0 for a rental, where it is not known."""
        return self.parts["energy"] / self.per_million_tokens.value


def landed_multiplier(a: Assumptions) -> float:
    """Landed price over CIF, all import and sales taxes in it."""
    duty, excise, federal = a.import_duty_share, a.excise_share, a.federal_contributions_share
    if a.redata:  # suspends the federal ones
        duty = excise = federal = 0.0
    before = 1 + duty + (1 + duty) * excise + federal
    return before / (1 - a.inside_tax_share) * (1 + a.sales_tax_share)


def purchase(gpu: Gpu, num_gpus: int, a: Assumptions) -> Purchase:
    """UsageError for a GPU whose price is not known."""
    usd = _price(gpu, a)
    price = num_gpus * usd.value * (1 + a.network_share_of_price) * a.currency_per_usd
    freight = price * a.freight_insurance_share
    multiplier = landed_multiplier(a)
    taxes = (price + freight) * (multiplier - 1) * (1 - a.recoverable_share)
    return Purchase(price, freight, taxes, multiplier, Figure(1.0, usd.low / usd.value, usd.high / usd.value))


def has_price(gpu: Gpu, a: Assumptions) -> bool:
    """Whether `cost` can say anything about it."""
    return (a.rental_usd_per_hour(gpu.key) if a.acquisition == "rental" else a.purchase_usd(gpu.key)) is not None


def cost(
    d: Deployment,
    prediction: Prediction,
    assumptions: Assumptions | None = None,
    drawn: Power | None = None,
) -> Cost:
    """Of a deployment under the predicted load. `drawn`: its power, if it is known already.

    UsageError for a GPU whose price is not known: see `has_price`.
    """
    a = assumptions or load_assumptions()
    drawn = drawn or power(d, prediction, a)
    tokens_per_s = served_tokens_per_s(d, prediction)
    tokens_per_hour = tokens_per_s.value * 3600 * a.utilization_share
    mean_watts = drawn.pue * (
        drawn.wall_watts.value * a.utilization_share + drawn.idle_wall_watts * (1 - a.utilization_share)
    )
    if a.acquisition == "rental":
        bought, by_hour = None, _rent_by_hour(d, a)
        per_hour = Estimate(*(sum(by_hour.values()),) * 3)
    else:
        bought = purchase(d.gpu, d.layout.num_gpus, a)
        by_hour = _owned_by_hour(d, a, bought, mean_watts / 1e3)
        ends = (bought.range.low, bought.range.high)
        low, high = (_owned_by_hour(d, a, _times(bought, end), mean_watts / 1e3) for end in ends)
        per_hour = Estimate(*(sum(each.values()) for each in (by_hour, low, high)))
    return Cost(
        currency=a.currency,
        acquisition=a.acquisition,
        per_million_tokens=ratio(per_hour.scaled(1e6 / tokens_per_hour), tokens_per_s.scaled(1 / tokens_per_s.value)),
        parts={name: by_hour[name] / tokens_per_hour * 1e6 for name in PARTS},
        per_hour=per_hour,
        tokens_per_hour=tokens_per_hour,
        kwh_per_million_tokens=mean_watts / 1e3 / tokens_per_hour * 1e6,
        purchase=bought,
    )


def _times(bought: Purchase, factor: float) -> Purchase:
    """At another price."""
    paid = (bought.price * factor, bought.freight * factor, bought.taxes * factor)
    return Purchase(*paid, bought.multiplier, bought.range)


def _rent_by_hour(d: Deployment, a: Assumptions) -> dict[str, float]:
    usd = a.rental_usd_per_hour(d.gpu.key)
    if usd is None:
        raise _unknown_price(d.gpu, a, "rental_usd_per_gpu_hour")
    rent = usd * d.layout.num_gpus * a.currency_per_usd
    return {"hardware": rent, "taxes": rent * a.rental_tax_share, "energy": 0.0, "operation": 0.0}


def _owned_by_hour(d: Deployment, a: Assumptions, bought: Purchase, mean_kw: float) -> dict[str, float]:
    before_taxes = bought.price + bought.freight
    left = bought.price * a.residual_share  # what the next owner pays holds no import taxes
    per_server = d.gpu.system_gpus if d.gpu.system_name else a.gpus_per_server
    reserved_kw = server_kw(d.gpu, a).value / per_server * d.layout.num_gpus
    hosting = reserved_kw * a.hosting_usd_per_kw_month * a.currency_per_usd / HOURS_PER_MONTH
    return {
        "hardware": yearly(before_taxes, left, a) / HOURS_PER_YEAR,
        "taxes": yearly(bought.taxes, 0.0, a) / HOURS_PER_YEAR,
        "energy": mean_kw * a.electricity_per_kwh,
        "operation": hosting + bought.price * a.opex_share_per_year / HOURS_PER_YEAR,
    }


def yearly(paid: float, left: float, a: Assumptions) -> float:
    """What a purchase costs a year: equal payments that at the interest are worth what was paid less what is left."""
    r, years = a.interest_share_per_year, a.life_years
    if r == 0:
        return (paid - left) / years
    growth = (1 + r) ** years
    return (paid * growth - left) * r / (growth - 1)


def electricity_per_million_tokens(wall_joules_per_token: float, pue: float, tariff_per_kwh: float) -> float:
    """Electricity alone, of the hours that tokens are made in."""
    return wall_joules_per_token / 3.6 * pue * tariff_per_kwh


def _price(gpu: Gpu, a: Assumptions) -> Figure:
    found = a.purchase_usd(gpu.key)
    if found is None:
        raise _unknown_price(gpu, a, "purchase_usd_per_gpu")
    return found


def _unknown_price(gpu: Gpu, a: Assumptions, key: str) -> UsageError:
    other = "rental" if a.acquisition == "purchase" else "purchase"
    return UsageError(
        f"no {a.acquisition} price of {gpu.name} is known",
        hint=f"in --assumptions: {key}: {{{gpu.key}: ...}}, or acquisition: {other}",
    )
