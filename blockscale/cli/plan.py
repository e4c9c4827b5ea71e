"""Say what a model takes on a GPU and what it gives there, before anyone buys or downloads anything.

Memory by part, requests admitted, time to the first token (TTFT) and between tokens (ITL), throughput with 80 %
intervals, what holds it back, power and cost. With targets and no --layout it searches for what meets them at the least
cost; without --gpu among all that can be bought. No GPU is needed, and no weight is read.

examples:
  blockscale plan llama-3.1-70b --gpu h200 --format nvfp4 --kv-cache fp8 --concurrency 64
  blockscale plan deepseek-r1 --gpu b200 --layout dep8 --format nvfp4 --input 2048 --output 512 --rate 5
  blockscale plan llama-3.1-70b --ttft-ms 500 --itl-ms 30 --rate 20 --report plan.html --language pt-BR
  blockscale plan llama-3.1-70b --gpu b200 --format nvfp4 --compare fp8@h200 --concurrency 64
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockscale.planning.answer.result import PlanResult
    from blockscale.planning.money.energy import Racks
    from blockscale.planning.speed.predict import Estimate

NAME = "plan"
HELP = "say what a model takes on a GPU, how fast it is and what it costs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a preset (llama-3.1-70b), a folder, a config.json or a hub id")
    add("--gpu", metavar="NAME|FILE.toml", help="of the catalogue, or described in a file (default: this machine's)")
    add("--gpus", type=int, metavar="N", help="how many (default: 1, or as many as the layout takes)")
    add("--format", metavar="F", help="of the layers' weights: bf16, fp8, nvfp4, mxfp4, int4 (default: as stored)")
    add("--kv-cache", metavar="F", help="bf16, fp8 or nvfp4 (default: bf16; of a search fp8 where it is native)")
    add("--layout", metavar="L", help="tp8, tp4pp2, tep8, dep8, tp2dp4 ... (default: what serves the load best)")
    add(
        "--engine",
        metavar="E",
        help="vllm, sglang, tensorrt-llm or blockscale: whose calibration is used (without one it changes nothing)",
    )
    add("--input", type=int, default=1024, metavar="N", help="prompt tokens of a request, on average (default: 1024)")
    add("--output", type=int, default=1024, metavar="N", help="tokens it generates (default: 1024)")
    add("--concurrency", type=int, metavar="N", help="requests in flight (default: as many as fit)")
    add("--rate", type=float, metavar="R", help="requests a second, instead of --concurrency")
    add("--ttft-ms", type=float, metavar="X", help="target: milliseconds to the first token")
    add("--itl-ms", type=float, metavar="X", help="target: milliseconds between tokens")
    add("--sure", action="store_true", help="targets must hold at the unfavourable end of the 80 %% intervals, too")
    add("--objective", default="cost", metavar="O", help="of a search: cost, energy or gpus (default: cost)")
    add("--compare", action="append", default=[], metavar="F@GPU", help="beside it: fp8@h200, fp8@8xh200:tp8 ...")
    add(
        "--calibrate",
        nargs="+",
        default=[],
        metavar="FILE",
        help="fit to runs of an engine's own benchmark, and keep the fit",
    )
    add("--calibration-file", metavar="FILE", help="where fits are kept (default: the user's configuration)")
    add("--engine-version", metavar="V", help="whose fit is used")
    add("--assumptions", metavar="FILE.yaml", help="sets what energy and cost assume")
    add("--show-assumptions", action="store_true", help="print them as such a file, to start your own from")
    add("--country", metavar="CC", help="whose prices, tariffs and taxes: US, EU or BR (default: US)")
    add("--power-limit", type=float, metavar="WATTS", help="of each GPU's board, below its TDP (untested: an estimate)")
    add("--steps", type=int, metavar="N", help="of a diffusion model, for one image (default: 28)")
    add("--resolution", metavar="WxH", help="of its images: 1024 or 1024x768 (default: 1024)")
    add("--report", metavar="OUT.html", help="write one self-contained page")
    add("--language", default="en", metavar="L", help="of the page: en or pt-BR")
    add("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> None:
    from blockscale.cli.output import print_json
    from blockscale.planning.planner import plan  # not through api, which imports torch

    if args.show_assumptions:
        from blockscale.planning.hardware.catalogue import find_gpu
        from blockscale.planning.money.assumptions import load_assumptions, to_yaml

        described = () if args.gpu is None else (find_gpu(args.gpu).key,)
        print(to_yaml(load_assumptions(args.assumptions, args.country, described)), end="")
        return
    options = {k: v for k, v in vars(args).items() if k not in ("verb", "json", "show_assumptions")}
    result = plan(**options)
    if args.json:
        print_json(result.to_dict())
    else:
        print_plan(result)
    result.check_targets()


def print_plan(result: "PlanResult") -> None:
    from blockscale.cli.output import printable
    from blockscale.planning.answer import sentences
    from blockscale.planning.answer.language import language

    words = language("en")
    print(printable(sentences.title(result, words)))
    print(sentences.subtitle(result, words))
    for banner in sentences.banners(result, words):
        print()
        print(printable(f"** {banner}"))
    print()
    for sentence in (*sentences.answer(result, words), *sentences.formats(result, words)):
        print(printable(sentence))
    _print_figures(result)
    _print_memory(result)
    _print_bounds(result)
    _print_curve(result)
    _print_found(result)
    print()
    for notice in sentences.notices(result, words):
        print(printable(f"note: {notice}"))
    print(f"predictions: {words.word(result.priors)}; in brackets 80 % intervals")
    if result.wall_watts is not None:
        print(f"energy and cost: assumptions for {result.country}, dated and settable; --json and --report list them")


def _print_figures(result: "PlanResult") -> None:
    """Of this configuration, and of those it is compared with, a column each."""
    from blockscale.cli.output import print_table, printable

    columns = [dict(_figures(one)) for one in (result, *result.compared)]
    names = [one.name for one in (result, *result.compared)]
    titles = dict.fromkeys(row for column in columns for row in column)
    rows = [(row, *(column.get(row, "-") for column in columns)) for row in titles]
    rows = [row for row in rows if any(cell != "-" for cell in row[1:])]
    print()
    print_table(("", *map(printable, names)), rows)


def _figures(result: "PlanResult") -> Iterator[tuple[str, str]]:
    from blockscale.pages import number, size
    from blockscale.planning.answer import sentences
    from blockscale.planning.answer.language import language

    yield "fits", "yes" if result.fits else f"no, each GPU lacks {size(round(result.missing_bytes))}"
    how = "by the files' headers" if result.weights_are_exact else "by formula"
    yield "weights", f"{size(result.weights_bytes)} {how}, {number(result.bits_per_parameter, 3)} bits a parameter"
    if result.image_request is not None:
        yield from _image_figures(result)
        return
    yield "KV cache a token", size(round(result.kv_bytes_per_token))
    beside = round(result.kv_bytes_per_sequence)
    yield "KV cache a request beside them", f"{size(beside)}, full windows and states" if beside else "-"
    load = sentences.utilization(result, language("en"))
    yield "load", load or "-"
    yield "requests admitted", f"{result.max_sequences:,}"
    yield "requests running", "-" if result.sequences is None else f"{result.sequences:,.0f} (limit: {result.limit})"
    yield "TTFT, mean", _interval(result.ttft_ms, "ms")
    yield "ITL, mean", _interval(result.itl_ms, "ms")
    yield "output tokens/s and GPU", _interval(result.output_tokens_per_s_per_gpu)
    yield "output tokens/s", _interval(result.output_tokens_per_s)
    yield "capacity, output tokens/s", _interval(result.capacity_per_s)
    bill = result.bill
    yield "power, servers at the wall", _interval(result.wall_watts, "W")
    yield "power, GPU boards", "-" if bill.power is None else _interval(bill.power.board_watts, "W")
    yield "power, with cooling", "-" if bill.power is None else _interval(bill.power.facility_watts, "W")
    yield "J an output token, at the wall", _interval(result.joules_per_output_token)
    racks = bill.racks
    yield "racks", "-" if racks is None else _racks(racks)
    cost = bill.cost
    if cost is None:
        return
    yield f"{cost.currency} a million output tokens", _interval(cost.per_million_tokens)
    for part, amount in cost.parts.items():
        yield f"  {part}", number(amount, 3)
    yield f"{cost.currency} a month", _interval(cost.per_month)
    yield f"{cost.currency} to buy", "-" if cost.purchase is None else _interval(cost.purchase.estimate)


def _racks(racks: "Racks") -> str:
    """Whole systems, whatever share of them is planned."""
    from blockscale.pages import number

    systems = f"{racks.num_servers:,} x {racks.unit}"
    return f"{racks.num_racks:,}: {systems}, {number(racks.kw.value, 3)} kW nameplate in all"


def _image_figures(result: "PlanResult") -> Iterator[tuple[str, str]]:
    image = result.image
    if image is None:
        return
    yield "arithmetic of a step", f"{image.flops_per_step / 1e12:,.1f} TFLOP"
    yield "a step", _interval(image.step_s.scaled(1e3), "ms")
    yield f"an image ({image.request.steps} steps)", _interval(image.image_s, "s")
    yield "images an hour", _interval(result.images_per_hour)


def _interval(estimate: "Estimate | None", unit: str = "") -> str:
    from blockscale.planning.answer.language import language

    if estimate is None:
        return "-"
    if math.isinf(estimate.value):
        return language("en").text("endless")
    if estimate.low == estimate.value == estimate.high:
        return f"{language('en').number(estimate.value)} {unit}".rstrip()
    value, low, high = map(language("en").number, (estimate.value, estimate.low, estimate.high))
    return f"{value} {unit}".rstrip() + f" [{low}, {high}]"


def _print_memory(result: "PlanResult") -> None:
    from blockscale.pages import size

    memory = result.memory
    parts = [*((name, held) for name, held in memory.parts.items() if held)]
    free = "free" if result.image_request is not None else "free for the KV cache"
    parts.append((free, memory.free_bytes) if result.fits else ("missing", result.missing_bytes))
    rows = [(name, size(round(held)), f"{100 * held / memory.gpu_bytes:.1f} %") for name, held in parts]
    _table(("memory of each GPU", "size", f"of {size(memory.gpu_bytes)}"), rows)
    if memory.sequence_bytes:
        tokens = result.workload.input_tokens + result.workload.output_tokens
        print(f"each request of {tokens:,} tokens takes {size(round(memory.sequence_bytes))} of KV cache")


def _print_bounds(result: "PlanResult") -> None:
    from blockscale.planning.answer.language import language

    words = language("en")
    terms = (("a token", result.decode_bounds), ("a prompt", result.prefill_bounds), ("a step", result.image_bounds))
    for title, bounds in terms:
        rows = [
            (
                words.word(bound.name),
                f"{words.number(bound.ms)} ms",
                f"{100 * bound.share:.0f} %" if bound.share else "hidden",
                f"{words.number(bound.times_away)} x away" if i else "active",
            )
            for i, bound in enumerate(bounds)
        ]
        if rows:
            _table((f"{title} takes", "time", "share", "bound"), rows)


def _print_curve(result: "PlanResult") -> None:
    rows = [
        (
            f"{point.sequences:,}",
            _interval(point.itl_ms),
            _interval(point.ttft_ms),
            _interval(point.tokens_per_s_per_gpu),
        )
        for point in result.curve
    ]
    if rows:
        _table(("requests a replica", "ITL, ms", "TTFT, ms", "output tokens/s and GPU"), rows)


def _print_found(result: "PlanResult") -> None:
    if result.search is None:
        return
    from blockscale.planning.answer.language import language

    words, search = language("en"), result.search
    rows = [
        (
            ("* " if found.is_best else "  ") + f"{found.choice.name}, KV {found.choice.cache}",
            f"{found.batch:,.0f}",
            _interval(found.itl_ms),
            _interval(found.ttft_ms),
            words.number(found.tokens_per_s.value),
            _interval(found.cost_per_million_tokens),
            words.number(None if found.joules_per_output_token is None else found.joules_per_output_token.value),
            "yes" if found.is_sure else "no",
        )
        for found in search.shown()
    ]
    money = f"{'' if result.bill.cost is None else result.bill.cost.currency + ' '}a M output tokens"
    titles = ("meets the targets", "batch", "ITL, ms", "TTFT, ms", "tokens/s", money, "J/token, wall", "sure")
    _table(titles, rows)
    by = words.text(f"objective.{search.objective}")
    print(f"{len(search.found)} of {search.tried} configurations meet the targets; least {by} first")
    print("*: none is better in both this and ITL; sure: at the unfavourable end of the intervals, too")


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from blockscale.cli.output import print_table, printable

    print()
    print_table(titles, [[printable(cell) for cell in row] for row in rows])
