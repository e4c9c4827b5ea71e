"""Power, energy, racks and money of a prediction, as far as the GPU's power and price are known."""

from dataclasses import dataclass

from blockscale.errors import UsageError
from blockscale.planning.money.assumptions import Assumptions
from blockscale.planning.money.cost import Cost, cost, has_price
from blockscale.planning.money.energy import Power, Racks, power, racks, ratio, served_tokens_per_s
from blockscale.planning.speed.predict import Estimate, Prediction
from blockscale.planning.speed.roofline import Deployment


@dataclass(frozen=True)
class Bill:
    """None where something is not known.

    joules_per_output_token  at the wall; energy of prompts is in it
    why_no_racks             what `racks` says where no rack takes the server
    """

    power: Power | None = None
    joules_per_output_token: Estimate | None = None
    racks: Racks | None = None
    cost: Cost | None = None
    why_no_racks: str = ""


def bill(d: Deployment, prediction: Prediction, a: Assumptions) -> Bill:
    """Under the predicted load. A load that cannot be served has no price a token."""
    if d.gpu.tdp_watts is None:
        return Bill()
    drawn = power(d, prediction, a)
    needed, why = None, ""
    try:
        needed = racks(d.gpu, d.layout.num_gpus, a)
    except UsageError as error:
        why = str(error)
    if prediction.is_overloaded:
        return Bill(drawn, None, needed, None, why)
    joules = ratio(drawn.wall_watts, served_tokens_per_s(d, prediction))
    money = cost(d, prediction, a, drawn) if has_price(d.gpu, a) else None
    return Bill(drawn, joules, needed, money, why)
