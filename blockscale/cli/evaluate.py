"""Measure a checkpoint against the model it was made from.

Prints perplexity, divergence from the reference and agreement with it for each text, with 95 % intervals from a
paired bootstrap. With --max-kl or --max-perplexity-ratio the exit code is 1 where a text lies beyond the limit.

examples:
  blockscale evaluate model-nvfp4 --reference model --text en.txt pt.txt --report report.html
  blockscale evaluate model-nvfp4 --reference model --max-perplexity-ratio 1.05
"""

import argparse
from typing import TYPE_CHECKING

from blockscale.algorithms.activation_scale import ActivationScale

if TYPE_CHECKING:
    from blockscale.evaluation.result import Interval, Report

NAME = "evaluate"
HELP = "measure what quantization cost"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="CKPT", help="a checkpoint of any dialect, or a 16-bit model")
    parser.add_argument("--reference", metavar="MODEL", help="the 16-bit model that it was made from")
    parser.add_argument(
        "--text",
        nargs="+",
        action="extend",
        metavar="FILE",
        help="texts as for quantize --calibration, each by itself; by default en-evaluation and pt-evaluation (the "
        "package's own)",
    )
    parser.add_argument(
        "--tasks", nargs="+", action="extend", default=[], metavar="TASK", help="lm-eval names or files"
    )
    parser.add_argument("--task-limit", type=int, metavar="N", help="samples of each task")
    parser.add_argument("--window", type=int, metavar="N", help="tokens a window (512, or the model's context)")
    parser.add_argument("--stride", type=int, metavar="N", help="tokens from window to window (the window: no overlap)")
    parser.add_argument("--start", type=float, default=0.0, metavar="F", help="where in a text to begin, 0 to 1 (0)")
    parser.add_argument("--max-tokens", type=int, default=20_480, metavar="N", help="tokens of each text (20480)")
    parser.add_argument("--batch-size", type=int, default=4, metavar="N", help="windows at once (4)")
    parser.add_argument("--weights-only", action="store_true", help="leave activations and KV cache in 16 bits")
    parser.add_argument(
        "--activation-scale",
        choices=[method.value for method in ActivationScale],
        help="how block scales of NVFP4 activations are chosen: amax is what other engines do (as the checkpoint says)",
    )
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--max-kl", type=float, metavar="X", help="fail if a text's mean KL (nats) is larger")
    parser.add_argument("--max-perplexity-ratio", type=float, metavar="X", help="fail if a text's ratio is larger")
    parser.add_argument("--report", metavar="OUT.html", help="write one self-contained page")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> None:
    from blockscale import api, texts
    from blockscale.cli.output import notice, print_json, progress_bar, quiet_libraries, reader_may_leave

    quiet_libraries()
    api.require_reference(args.reference is not None, args.max_kl, args.max_perplexity_ratio)
    with progress_bar() as progress:
        report = api.evaluate(
            args.model,
            args.reference,
            text=args.text or (() if args.tasks else texts.EVALUATION),
            tasks=args.tasks,
            task_limit=args.task_limit,
            window=args.window,
            stride=args.stride,
            start=args.start,
            max_tokens=args.max_tokens,
            batch_size=args.batch_size,
            weights_only=args.weights_only,
            activation_scale=args.activation_scale,
            device=args.device,
            report=args.report,
            progress=progress,
        )
    for message in report.notices:
        notice(message)
    with reader_may_leave():
        if args.json:
            print_json(report.to_dict())
        else:
            print_report(report)
    if args.max_kl is not None or args.max_perplexity_ratio is not None:
        # after the figures are out: a failed check still shows what was measured
        api.check_gates(report, args.max_kl, args.max_perplexity_ratio)


def print_report(report: "Report") -> None:
    """The table of texts, and of tasks where there are any."""
    from blockscale.cli.output import print_table

    def cell(interval: "Interval | None", digits: int) -> str:
        if interval is None:
            return "-"
        return f"{interval.value:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"

    if report.texts:
        print_table(
            ("text", "tokens", "perplexity", "reference", "ratio", "KL (nats)", "same top-1"),
            [
                (
                    t.name,
                    str(t.num_tokens),
                    f"{t.perplexity.value:.2f}",
                    f"{t.reference_perplexity.value:.2f}" if t.reference_perplexity else "-",
                    cell(t.perplexity_ratio, 3),
                    cell(t.kl_mean, 4),
                    cell(t.top1_agreement, 3),
                )
                for t in report.texts
            ],
        )
    if report.tasks:
        compared = {c.name: c for c in report.task_comparisons}
        print_table(
            ("task", "samples", "metric", "score", "minus reference"),
            [
                (
                    t.name,
                    str(t.num_samples),
                    t.metric,
                    cell(t.score, 3),
                    cell(compared[t.name].difference, 3) if t.name in compared else "-",
                )
                for t in report.tasks
            ],
        )
    print(f"{report.bits_per_parameter:.2f} bits per parameter. {report.convention}")
