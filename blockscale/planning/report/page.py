"""A plan as one HTML page, for whoever signs the purchase."""

import datetime
import math
from importlib.metadata import version
from pathlib import Path

from blockscale.pages import render_page, write_page
from blockscale.planning.answer import sentences
from blockscale.planning.answer.language import Language, language
from blockscale.planning.answer.result import Bound, PlanResult
from blockscale.planning.hardware.catalogue import Figure
from blockscale.planning.money.assumptions import Record
from blockscale.planning.report.plots import Mark, Plot, Stacks, log_plot, stacks
from blockscale.planning.speed.predict import Estimate

MAX_LINES = 8  # as many colours
MAX_ROWS = 20
PLOTTED = 20  # times the best: what is worse would press the others together


def render_plan(result: PlanResult, code: str = "en", today: datetime.date | None = None) -> str:
    """`code`: en or pt-BR. UsageError for another one."""
    words = language(code)
    everyone = (result, *result.compared)
    return render_page(
        "planning/report/plan.html.j2",
        {
            "n": words.number,
            "range": words.range,
            "gb": words.size,
            "watts": words.watts,
            "money": words.money,
            "word": words.word,
            "pct": words.percentage,
        },
        t=words.text,
        words=words,
        result=result,
        endless=math.inf,
        load=lambda one: sentences.utilization(one, words),
        title=sentences.title(result, words),
        subtitle=sentences.subtitle(result, words),
        answer=sentences.answer(result, words),
        formats=sentences.formats(result, words),
        banners=sentences.banners(result, words),
        notices=sentences.notices(result, words),
        everyone=everyone,
        curve=curve_plot(everyone, words),
        memory=memory_bars(everyone, words),
        costs=cost_bars(everyone, words),
        years=next((r.value for r in result.assumptions if r.key == "life_years"), None),
        records=[(r.key, shown(r.value, words), r.date, r.source) for r in records(everyone)],
        bounds=bound_rows(result),
        currency="" if result.bill.cost is None else result.bill.cost.currency,
        search_plot=search_plot(result, words),
        found=() if result.search is None else result.search.shown(MAX_ROWS),
        assumptions=assumptions(result, words, today or datetime.date.today()),
    )


def curve_plot(everyone: tuple[PlanResult, ...], words: Language) -> Plot | None:
    """Throughput of a GPU against the speed that a user sees, a line a configuration."""
    series = []
    for one in everyone[:MAX_LINES]:
        points = []
        for point in one.curve:
            each, speed = point.tokens_per_s_per_gpu, 1e3 / point.itl_ms.value
            said = words.text(
                "curve.point",
                sequences=point.sequences,
                speed=words.number(speed),
                throughput=words.number(each.value),
            )
            points.append(Mark(speed, each.value, each.low, each.high, said))
        if points:
            series.append((one.name, points))
    return log_plot(series, words.short)


def memory_bars(everyone: tuple[PlanResult, ...], words: Language) -> Stacks | None:
    """One GPU of each configuration, and the memory that it has."""
    bars = []
    for one in everyone:
        memory = one.memory
        pieces = [(words.text(f"part.{name}"), float(size)) for name, size in memory.parts.items()]
        if one.fits:
            free = "part.free" if one.image_request is None else "part.rest"
            pieces.append((words.text(free), memory.free_bytes))
            pieces.append((words.text("part.not used"), memory.gpu_bytes - memory.usable_bytes))
        bars.append((one.name, pieces, float(memory.gpu_bytes)))
    return stacks(bars, words.size, words.text("part.not used"))


def cost_bars(everyone: tuple[PlanResult, ...], words: Language) -> Stacks | None:
    """A million output tokens of each configuration, by what the money goes to."""
    known = [(one.name, one.bill.cost) for one in everyone if one.bill.cost is not None]
    if not known:
        return None
    currency = known[0][1].currency
    bars = [
        (name, [(words.text(f"cost.{part}"), amount) for part, amount in cost.parts.items()], None)
        for name, cost in known
    ]
    return stacks(bars, lambda amount: words.money(amount, currency))


def records(everyone: tuple[PlanResult, ...]) -> list[Record]:
    """Every assumption of any of them, once."""
    return list({record.key: record for one in everyone for record in one.assumptions}.values())


def shown(value: object, words: Language) -> str:
    """A value of an assumption; prices with their range."""
    if isinstance(value, Figure):
        ends = words.range(Estimate(value.value, value.low, value.high))
        return f"{words.number(value.value)} ({ends})"
    if isinstance(value, bool) or value is None:
        return words.text("yes" if value else "no")
    return words.number(value) if isinstance(value, float) else str(value)


def bound_rows(result: PlanResult) -> list[tuple[str, tuple[Bound, ...]]]:
    """(key of the heading, terms), of what there is."""
    named = [
        ("bounds.decode", result.decode_bounds),
        ("bounds.prefill", result.prefill_bounds),
        ("bounds.image", result.image_bounds),
    ]
    return [(key, bounds) for key, bounds in named if bounds]


def search_plot(result: PlanResult, words: Language) -> Plot | None:
    """The objective against the time between tokens, a mark a configuration."""
    if result.search is None:
        return None
    points = []
    best = result.search.found[0].figure(result.search.objective) if result.search.found else None
    for found in result.search.found:
        figure = found.figure(result.search.objective)
        if figure is not None and best is not None and figure <= PLOTTED * best:
            said = f"{found.choice.name}: {words.number(found.itl_ms.value)} ms, {words.number(figure)}"
            points.append(Mark(found.itl_ms.value, figure, figure, figure, said, found.is_best))
    return log_plot([("", points)], words.short) if points else None


def assumptions(result: PlanResult, words: Language, today: datetime.date) -> list[str]:
    """Everything that the figures rest on."""
    lines = [words.text("assumption.prediction", priors=words.word(result.priors))]
    lines.append(words.text("assumption.exact" if result.weights_are_exact else "assumption.formula"))
    for gpu in dict.fromkeys(one.choice.gpu.key for one in (result, *result.compared)):
        own = next(one.choice.gpu for one in (result, *result.compared) if one.choice.gpu.key == gpu)
        lines.append(
            words.text(
                "assumption.gpu",
                gpu=own.name,
                memory=words.size(own.memory_bytes),
                bandwidth=words.number(own.bandwidth.value / 1e12),
                confidence=own.confidence or "?",
                notes=own.notes,
            )
        )
    lines.append(words.text("assumption.date", date=today.isoformat(), version=version("blockscale")))
    return lines


def write_plan(result: PlanResult, path: str | Path, code: str = "en") -> None:
    """Writes the page; the file appears whole or not at all."""
    write_page(render_plan(result, code), path)
