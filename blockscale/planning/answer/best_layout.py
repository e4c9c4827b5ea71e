"""The layout that serves a load best on a given number of GPUs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from blockscale.errors import UsageError
from blockscale.planning.answer.choice import Choice, Wanted, default_layout, deploy, weights_in
from blockscale.planning.answer.plan import Targets
from blockscale.planning.answer.result import Notice
from blockscale.planning.answer.search import excess_over, replica_layouts
from blockscale.planning.models.architecture import Architecture
from blockscale.planning.models.model import Model
from blockscale.planning.money.assumptions import Assumptions
from blockscale.planning.money.bill import bill
from blockscale.planning.speed.layout import Layout, check_layout
from blockscale.planning.speed.memory import plan_memory
from blockscale.planning.speed.predict import Prediction, Priors, Workload, predict
from blockscale.planning.speed.roofline import Deployment


@dataclass(frozen=True)
class _Served:
    """`figure`: of a token, less is better: what it costs, the energy that it takes, or the time."""

    layout: Layout
    prediction: Prediction
    excess: float
    figure: float

    @property
    def rank(self) -> tuple[bool, float, bool, float]:
        """What serves the load, within the targets, at the least figure."""
        p = self.prediction
        over = (p.utilization or 0.0) if p.is_overloaded else 0.0
        return p.is_overloaded, over, self.excess > 1, self.figure


def best_layout(
    model: Model,
    wanted: Wanted,
    workload: Workload,
    targets: Targets,
    priors_for: Callable[[Deployment], Priors],
    assumptions: Assumptions,
) -> tuple[Layout, tuple[Notice, ...]]:
    """Of all that `wanted.num_gpus` GPUs can have, and which it was and why; where none fits, the usual one."""
    num_gpus = wanted.num_gpus or 1
    usual = default_layout(model.architecture, wanted.gpu, num_gpus, weights_in(model, wanted.format).num_bytes)
    if num_gpus == 1 or not model.architecture.vocabulary:
        return usual, ()
    served = []
    for layout in dict.fromkeys((usual, *_layouts(model.architecture, wanted, num_gpus))):
        d = deploy(model, Choice(wanted.gpu, layout, wanted.format, wanted.cache))
        if plan_memory(d, workload.input_tokens + workload.output_tokens).fits:
            p = predict(d, workload, priors_for(d))
            served.append(_Served(layout, p, excess_over(targets, p), _figure(d, p, assumptions)))
    if not served:
        return usual, ()
    first, *others = sorted(served, key=lambda one: one.rank)
    alike = [first, *(one for one in others if _is_alike(one, first))]
    best = min(alike, key=lambda one: one.prediction.itl_s.value)
    return best.layout, (_why(best, [one for one in (first, *others) if one is not best], alike, wanted, num_gpus),)


_ALIKE = 1.05  # figures of a token that no prediction can tell apart


def _is_alike(one: _Served, first: _Served) -> bool:
    return one.rank[:3] == first.rank[:3] and one.figure <= _ALIKE * first.figure


def _layouts(architecture: Architecture, wanted: Wanted, num_gpus: int) -> Iterator[Layout]:
    for one in replica_layouts(architecture, wanted.gpu):
        if num_gpus % one.num_gpus == 0:
            layout = replace(one, replicas=num_gpus // one.num_gpus)
            try:
                check_layout(layout, architecture)
            except UsageError:
                continue
            yield layout


def _figure(d: Deployment, p: Prediction, assumptions: Assumptions) -> float:
    """The GPUs are the same in all layouts, so that money, energy and time rank nearly alike."""
    money = bill(d, p, assumptions)
    if money.cost is not None:
        return money.cost.per_million_tokens.value
    if money.joules_per_output_token is not None:
        return money.joules_per_output_token.value
    return 1 / p.tokens_per_s_per_gpu.value


def _why(best: _Served, others: list[_Served], alike: list[_Served], wanted: Wanted, num_gpus: int) -> Notice:
    values: dict[str, str | float] = {"layout": best.layout.name, "gpus": num_gpus, "gpu": wanted.gpu.name}
    if not others:
        return Notice("notice.layout_alone", values)
    second = others[0]
    values |= {"tried": len(others) + 1, "second": second.layout.name}
    if best.prediction.is_overloaded:
        return Notice("notice.layout_overloaded", values)
    if second.prediction.is_overloaded:
        return Notice("notice.layout_serves", values)
    if second.excess > 1 >= best.excess:
        return Notice("notice.layout_targets", values)
    if len(alike) > 1:
        return Notice("notice.layout_quickest", {**values, "alike": len(alike)})
    return Notice("notice.layout", {**values, "times": second.figure / best.figure})
