"""The best mixtures at every size: what more bytes would buy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blockscale.errors import UsageError
from blockscale.pages import render_page, write_page
from blockscale.planning.report.plots import Mark, Plot, log_plot
from blockscale.quantization.search.groups import KEPT, KV_GROUP
from blockscale.quantization.search.problem import Picks, Problem
from blockscale.quantization.search.sensitivity import Sensitivity
from blockscale.quantization.search.solve import cheapest, minimise, total

NUM_POINTS = 20


@dataclass(frozen=True)
class FrontPoint:
    """bits       a weight of the searched linears on average
    num_bytes  of files and cache, a few bytes of header off
    kl         predicted, nats a token
    shares     of the linears' weights, by format
    cache      the KV cache's format, where it was searched for
    figure     the budget's own, where a GPU is asked about: milliseconds or joules
    """

    bits: float
    num_bytes: int
    kl: float
    shares: Mapping[str, float]
    cache: str | None
    figure: float | None
    is_answer: bool = False


def find_front(problem: Problem, sensitivity: Sensitivity, answer: Picks) -> tuple[FrontPoint, ...]:
    """From the smallest mixture to 16 bits throughout, evenly by bytes, and the answer among them; smallest first."""
    sizes, scores = problem.num_bytes, sensitivity.table(problem.groups)
    least = total(sizes, cheapest(sizes, scores))
    most = total(sizes, cheapest(scores, sizes))
    found: dict[Picks, None] = {}
    for i in range(NUM_POINTS):
        picks = minimise(scores, sizes, least + (most - least) * i / (NUM_POINTS - 1))
        if picks is not None:
            found[picks] = None
    found[answer] = None
    points = [_point(problem, sensitivity.predicted(total(scores, p)), p, p == answer) for p in found]
    return tuple(sorted(points, key=lambda point: (point.num_bytes, -point.kl)))


def _point(problem: Problem, kl: float, picks: Picks, is_answer: bool) -> FrontPoint:
    shares: dict[str, float] = {}
    cache = None
    for group, pick in zip(problem.groups, picks, strict=True):
        name = group.options[pick].name
        if group.name == KV_GROUP:
            cache = name
        else:
            shares[name] = shares.get(name, 0.0) + group.num_parameters / problem.num_parameters
    figure = None if problem.site is None else problem.site.figure(problem.groups, picks)
    bits, size = problem.average_bits(picks), round(problem.about_bytes(picks))
    return FrontPoint(bits, size, kl, shares, cache, figure, is_answer)


def formats_of(points: Sequence[FrontPoint]) -> list[str]:
    """Every format of a front, 16 bits last."""
    names = dict.fromkeys(name for point in points for name in point.shares)
    return sorted(names, key=lambda name: name == KEPT)


def front_plot(points: Sequence[FrontPoint]) -> Plot | None:
    """Bits against divergence. None for a front without a point that loses anything: there is nothing to draw."""
    marks = [
        Mark(p.bits, p.kl, p.kl, p.kl, f"{p.bits:.2f} bits, {p.num_bytes / 1e9:.3f} GB, {p.kl:.3g} nats", p.is_answer)
        for p in points
        if p.kl > 0
    ]
    return log_plot([("mixtures", marks)], lambda value: f"{value:g}")


def write_front(points: Sequence[FrontPoint], path: str | Path, model: str) -> None:
    """An SVG, or an HTML page with the table below it, by the name's ending. UsageError for another one."""
    ending = check_front_path(path)
    page = render_page(
        f"quantization/search/front{ending}.j2",
        {},
        plot=front_plot(points),
        points=points,
        formats=formats_of(points),
        model=model,
        has_cache=any(point.cache for point in points),
    )
    write_page(page, path)


def check_front_path(path: str | Path) -> str:
    """The ending. UsageError, before the long work, for a file that is neither."""
    ending = Path(path).suffix.lower()
    if ending not in (".svg", ".html"):
        raise UsageError(f"--pareto {path}: neither .svg nor .html", hint="--pareto front.svg")
    return ending
