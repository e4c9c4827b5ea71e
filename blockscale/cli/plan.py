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
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockscale.planning.predict import Estimate
    from blockscale.planning.result import PlanResult

NAME = "plan"
HELP = "say what a model takes on a GPU, how fast it is and what it costs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a preset (llama-3.1-70b), a folder, a config.json or a hub id")
    add("--gpu", metavar="NAME|FILE.toml", help="of the catalogue, or described in a file (default: this machine's)")
    add("--gpus", type=int, metavar="N", help="how many (default: 1, or as many as the layout takes)")
    add("--format", metavar="F", help="of the layers' weights: bf16, fp8, nvfp4, mxfp4, int4 (default: as stored)")
    add("--kv-cache", metavar="F", help="bf16, fp8 or nvfp4 (default: bf16)")
    add("--layout", metavar="L", help="tp8, tp4pp2, tep8, dep8, tp2dp4 ... (default: tensor parallel)")
    add("--engine", metavar="E", help="vllm, sglang, tensorrt-llm or blockscale")
    add("--input", type=int, default=1024, metavar="N", help="prompt tokens of a request, on average (default: 1024)")
    add("--output", type=int, default=1024, metavar="N", help="tokens it generates (default: 1024)")
    add("--concurrency", type=int, metavar="N", help="requests in flight (default: as many as fit)")
    add("--rate", type=float, metavar="R", help="requests a second, instead of --concurrency")
    add("--ttft-ms", type=float, metavar="X", help="target: milliseconds to the first token")
    add("--itl-ms", type=float, metavar="X", help="target: milliseconds between tokens")
    add("--objective", default="cost", metavar="O", help="of a search: cost, energy or gpus (default: cost)")
    add("--compare", action="append", default=[], metavar="F@GPU", help="beside it: fp8@h200, fp8@8xh200:tp8 ...")
    add("--report", metavar="OUT.html", help="write one self-contained page")
    add("--language", default="en", metavar="L", help="of the page: en or pt-BR")
    add("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> None:
    from blockscale.cli.output import print_json
    from blockscale.planning.planner import plan  # not through api, which imports torch

    options = {k: v for k, v in vars(args).items() if k not in ("verb", "json")}
    result = plan(**options)
    if args.json:
        print_json(result.to_dict())
    else:
        print_plan(result)
    result.check_targets()


def print_plan(result: "PlanResult") -> None:
    from blockscale.cli.output import printable
    from blockscale.planning import sentences
    from blockscale.planning.language import language

    words = language("en")
    print(printable(sentences.title(result, words)))
    print(sentences.subtitle(result, words))
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
    print(f"predictions: efficiencies fitted to {result.priors}; in brackets 80 % intervals")


def _print_figures(result: "PlanResult") -> None:
    """Of this configuration, and of those it is compared with, a column each."""
    from blockscale.cli.output import print_table, printable

    columns = [dict(_figures(one)) for one in (result, *result.compared)]
    names = [one.name for one in (result, *result.compared)]
    rows = [(row, *(column[row] for column in columns)) for row in columns[0] if any(c[row] != "-" for c in columns)]
    print()
    print_table(("", *map(printable, names)), rows)


def _figures(result: "PlanResult") -> Iterator[tuple[str, str]]:
    from blockscale.pages import number, size

    yield "fits", "yes" if result.fits else f"no, {result.missing_bytes / 1e9:,.1f} GB a GPU are missing"
    yield "weights", f"{size(result.weights_bytes)}, {number(result.bits_per_parameter, 3)} bits a parameter"
    yield "KV cache a token", size(round(result.kv_bytes_per_token))
    yield "requests admitted", f"{result.max_sequences:,}"
    yield "requests running", "-" if result.sequences is None else f"{result.sequences:,.0f} (limit: {result.limit})"
    yield "TTFT", _interval(result.ttft_ms, "ms")
    yield "ITL", _interval(result.itl_ms, "ms")
    yield "tokens/s and GPU", _interval(result.output_tokens_per_s_per_gpu)
    yield "tokens/s", _interval(result.output_tokens_per_s)


def _interval(estimate: "Estimate | None", unit: str = "") -> str:
    from blockscale.planning.language import language

    if estimate is None:
        return "-"
    words = language("en")
    return (
        f"{words.number(estimate.value)} {unit}".strip()
        + f" [{words.number(estimate.low)}, {words.number(estimate.high)}]"
    )


def _print_memory(result: "PlanResult") -> None:
    memory = result.memory
    parts = [
        (name, f"{size / 1e9:,.2f} GB", _share(size, memory.gpu_bytes)) for name, size in memory.parts.items() if size
    ]
    left = (
        "free for the KV cache" if result.fits else "missing",
        max(memory.free_bytes, 0) if result.fits else result.missing_bytes,
    )
    parts.append((left[0], f"{left[1] / 1e9:,.2f} GB", _share(left[1], memory.gpu_bytes)))
    _table(("memory of each GPU", "size", f"of {memory.gpu_bytes / 1e9:,.1f} GB"), parts)
    if result.fits:
        print(
            f"one request of {result.workload.input_tokens + result.workload.output_tokens:,} tokens takes {memory.sequence_bytes / 1e6:,.1f} MB of it"
        )


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %"


def _print_bounds(result: "PlanResult") -> None:
    for title, bounds in (
        ("a token's time goes to", result.decode_bounds),
        ("a prompt's time goes to", result.prefill_bounds),
    ):
        rows = [
            (
                b.name,
                f"{b.ms:,.3g} ms",
                f"{100 * b.share:.0f} %" if b.share else "hidden",
                "active" if i == 0 else f"{b.times_away:,.3g} x away",
            )
            for i, b in enumerate(bounds)
        ]
        if rows:
            _table((title, "time", "share", "bound"), rows)


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
        _table(("requests a replica", "ITL ms", "TTFT ms", "tokens/s and GPU"), rows)


def _print_found(result: "PlanResult") -> None:
    if result.search is None:
        return
    from blockscale.planning.language import language

    words, search = language("en"), result.search
    rows = [
        (
            ("* " if found.is_best else "  ") + found.choice.name,
            f"{found.batch:,.0f}",
            words.number(found.itl_ms.value),
            words.number(found.ttft_ms.value),
            words.number(found.tokens_per_s.value),
            words.number(found.cost_per_million_tokens),
            words.number(found.joules_per_output_token),
            "yes" if found.is_sure else "no",
        )
        for found in search.shown()
    ]
    _table(("meets the targets", "batch", "ITL ms", "TTFT ms", "tokens/s", "$/M tokens", "J/token", "sure"), rows)
    print(
        f"{len(search.found)} of {search.tried} configurations meet the targets, best {words.text('objective.' + search.objective)} first; "
        "*: none is better in objective, latency and GPUs together; sure: at the unfavourable end of the intervals, too"
    )


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from blockscale.cli.output import print_table, printable

    print()
    print_table(titles, [[printable(cell) for cell in row] for row in rows])
