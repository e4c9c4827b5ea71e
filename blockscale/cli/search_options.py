"""`quantize`'s budgets: options, and what a search says."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockscale.quantization.search.budget import Budget
    from blockscale.quantization.search.mixture import Mixture

_BUDGETS = ("bits", "bytes", "max_kl", "itl_ms", "joules")


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "mixed precision",
        "One budget, and each group of layers gets the recipe's format, FP8 or 16 bits so that the least is lost. "
        "Needs --calibration. Where OUT is a .yaml file, the recipe that was found is written, and no weights.",
    )
    group.add_argument("--bits", type=float, metavar="X", help="a weight of the quantized linears on average: 5.0")
    group.add_argument(
        "--bytes", metavar="SIZE", help="of all weight files: 20GB; with --context, of the cache as well"
    )
    group.add_argument("--max-kl", type=float, metavar="X", help="nats a token lost at most, in the fewest bytes: 0.02")
    group.add_argument("--itl-ms", type=float, metavar="X", help="predicted milliseconds between tokens on --gpu")
    group.add_argument("--joules", type=float, metavar="X", help="predicted joules an output token on --gpu")
    group.add_argument("--gpu", metavar="NAME", help="a name of `plan`'s catalogue or a .toml file")
    group.add_argument("--gpus", type=int, default=1, metavar="N", help="of that kind (1)")
    group.add_argument("--concurrency", type=int, default=1, metavar="N", help="requests in flight there (1)")
    group.add_argument(
        "--context", type=int, metavar="N", help="tokens of a sequence: the KV cache's format is searched for, too"
    )
    group.add_argument(
        "--sensitivity",
        choices=("calibrated", "gradient", "kl"),
        default="calibrated",
        help="how options are scored: gradients scaled by measurements (default), gradients alone, or a measurement "
        "of each",
    )
    group.add_argument("--scores", metavar="FILE.json", help="keep scores there, and take them from there another time")
    group.add_argument(
        "--pareto", metavar="FILE", help="print the best mixture of every size, and draw them: .svg, .html"
    )
    group.add_argument("--save-recipe", metavar="FILE.yaml", help="keep what was found as a recipe, beside OUT")


def read_budget(args: argparse.Namespace) -> "Budget | None":
    """None where no search is asked for. UsageError for options that only a search has."""
    from blockscale.errors import UsageError
    from blockscale.quantization.search.budget import Budget, parse_size

    given = [name for name in _BUDGETS if getattr(args, name) is not None]
    if not given:
        lone = next((n for n in ("gpu", "context", "scores", "pareto", "save_recipe") if getattr(args, n)), None)
        if lone is not None:
            raise UsageError(f"--{lone.replace('_', '-')} needs a budget", hint="for example --bits 5.0")
        return None
    return Budget(
        args.bits,
        None if args.bytes is None else parse_size(args.bytes),
        args.max_kl,
        args.itl_ms,
        args.joules,
        args.gpu,
        args.gpus,
        args.concurrency,
        args.context,
    )


def print_mixture(mixture: "Mixture", *, with_front: bool) -> None:
    """What was picked, and with `with_front` what could have been."""
    from blockscale.cli.output import print_table
    from blockscale.pages import size
    from blockscale.quantization.search.front import formats_of

    point = next(point for point in mixture.front if point.is_answer)
    shares = ", ".join(f"{100 * share:.0f} % in {name}" for name, share in sorted(point.shares.items()))
    cache = f"; KV cache in {point.cache}" if point.cache else ""
    print(f"{mixture.recipe.name}: {mixture.bits:.2f} bits a weight, {size(mixture.num_bytes)}: {shares}{cache}")
    print(
        f"KL divergence, nats a token: predicted {mixture.predicted_kl:.4g}, measured {mixture.measured_kl:.4g} on "
        f"{mixture.sensitivity.num_measured_tokens} tokens held back"
    )
    if mixture.budget.is_predicted:
        print(f"predicted on {mixture.budget.gpus} x {mixture.budget.gpu}: {mixture.budget.said(mixture.figure)}")
    if not with_front:
        return
    formats = formats_of(mixture.front)
    has_cache, has_figure = point.cache is not None, point.figure is not None
    headers = ["", "bits", "size", "predicted KL", *formats]
    headers += ["ms" if mixture.budget.itl_ms is not None else "J"] if has_figure else []
    headers += ["KV cache"] if has_cache else []
    rows = []
    for p in mixture.front:
        row = ["chosen" if p.is_answer else "", f"{p.bits:.2f}", size(p.num_bytes), f"{p.kl:.4g}"]
        row += [f"{100 * p.shares.get(name, 0.0):.0f} %" for name in formats]
        row += [f"{p.figure:.4g}"] if p.figure is not None else []
        row += [p.cache or ""] if has_cache else []
        rows.append(row)
    print_table(headers, rows)
