"""What a reader has to know beside the figures: of the hardware, of the money, of the load."""

import math
from collections.abc import Iterator

from blockscale.planning.answer.choice import Choice
from blockscale.planning.answer.result import Notice
from blockscale.planning.money.assumptions import Assumptions
from blockscale.planning.money.bill import Bill
from blockscale.planning.money.cost import has_price, purchase
from blockscale.planning.money.energy import is_rack
from blockscale.planning.speed.predict import Prediction, Priors, default_priors, measured_gpus
from blockscale.planning.speed.roofline import Deployment

IDLE = 0.3  # of what could be served; below it the price of a token is mostly that of waiting for one


def situation(
    d: Deployment, choice: Choice, prediction: Prediction | None, money: Bill, a: Assumptions
) -> Iterator[Notice]:
    """Of the GPU, how it is joined and how it is sold."""
    gpu, joined = d.gpu, choice.layout.gpus_per_replica
    if not d.architecture.vocabulary:
        yield Notice("notice.no_tokens", {"model": d.architecture.name})
    if money.power is not None:
        yield from _sold_whole(d, a)
    if money.why_no_racks:
        yield Notice("notice.no_racks", {"why": money.why_no_racks})
    if a.gpu_power_limit_watts is not None:
        yield Notice("notice.power_limit", {"watts": f"{a.gpu_power_limit_watts:g}"})
    if gpu.is_roadmap:
        yield Notice("notice.roadmap", {"gpu": gpu.name, "status": gpu.status, "notes": gpu.notes})
    elif gpu.confidence.startswith("low"):
        yield Notice("notice.unconfirmed", {"gpu": gpu.name, "notes": gpu.notes})
    if joined > gpu.link_domain:
        values = {"layout": choice.layout.name, "gpu": gpu.name, "joined": str(joined), "reach": str(gpu.link_domain)}
        yield Notice("notice.beyond_link" if gpu.link_domain > 1 else "notice.no_link", values)


def _sold_whole(d: Deployment, a: Assumptions) -> Iterator[Notice]:
    """GPUs on a fast link are sold in systems: what the whole costs, if only some of it is planned."""
    gpu, used = d.gpu, d.layout.num_gpus
    if gpu.link_domain == 1 or used % gpu.system_gpus == 0 or (a.acquisition == "rental" and not is_rack(gpu)):
        return
    whole = math.ceil(used / gpu.system_gpus) * gpu.system_gpus
    values: dict[str, str | float] = {"unit": gpu.system_name, "gpus": gpu.system_gpus, "used": used, "whole": whole}
    if a.acquisition == "rental" or not has_price(gpu, a):
        yield Notice("notice.sold_whole", values)
    else:
        values |= {"currency": a.currency, "cost": purchase(gpu, whole, a).total}
        yield Notice("notice.sold_whole_cost", values)


def remarks(
    d: Deployment, prediction: Prediction | None, money: Bill, a: Assumptions, priors: Priors, most_tokens_per_s: float
) -> Iterator[Notice]:
    """Of predictions, energy and money. `most_tokens_per_s`: of a GPU, with as many requests as are admitted."""
    if prediction is None:
        return
    gpu = d.gpu
    if money.power is None:
        yield Notice("notice.no_power", {"gpu": gpu.name})
    elif not has_price(gpu, a):
        yield Notice(f"notice.no_price_{a.acquisition}", {"gpu": gpu.name, "key": gpu.key})
    if priors == default_priors() and gpu.key not in measured_gpus() and not gpu.is_roadmap:
        yield Notice("notice.unmeasured", {"gpu": gpu.name, "others": ", ".join(measured_gpus()).upper()})
    share = prediction.utilization
    if share is None:
        share = prediction.tokens_per_s_per_gpu.value / most_tokens_per_s
    if share < IDLE and money.joules_per_output_token is not None:
        yield Notice("notice.idle", {"share": f"{100 * share:.0f}" if share >= 0.01 else "< 1"})
    if a.acquisition == "rental" and a.country == "BR" and not a.rental_tax_share:
        yield Notice("notice.untaxed_rent", {})
    if a.redata:
        yield Notice("notice.redata", {})
