"""Limits that a report must keep: the checks behind `--max-kl` and `--max-perplexity-ratio`."""

import math

from blockscale.errors import CheckFailed, UsageError
from blockscale.evaluation.result import Interval, Report


def check_gates(report: Report, max_kl: float | None = None, max_perplexity_ratio: float | None = None) -> None:
    """CheckFailed that names each text beyond a limit, what was measured and the limit.

    Every text must keep the limits by itself, so one bad language cannot hide in a good mean. A value equal to the
    limit passes; NaN never does. UsageError if there is nothing to check against.
    """
    gates = [
        (what, limit, [(text.name, getattr(text, attribute)) for text in report.texts])
        for what, limit, attribute in (
            ("mean KL (nats)", max_kl, "kl_mean"),
            ("perplexity ratio", max_perplexity_ratio, "perplexity_ratio"),
        )
        if limit is not None
    ]
    failures = []
    for what, limit, measured in gates:
        check_limit(what, limit, measured)
        failures += [
            f"{what} on {name} is {describe(interval)}, limit {limit:g}"
            for name, interval in measured
            if not interval.value <= limit
        ]
    if failures:
        raise CheckFailed(
            f"{report.model}: " + "; ".join(failures),
            hint="keep more layers in 16 bits, use a stronger recipe, or raise the limit",
        )


def require_reference(has_reference: bool, max_kl: float | None, max_perplexity_ratio: float | None) -> None:
    """UsageError, before any work, for limits that nothing could be held against."""
    for what, limit in (("mean KL (nats)", max_kl), ("perplexity ratio", max_perplexity_ratio)):
        if limit is not None and not limit >= 0:
            raise UsageError(f"the limit for the {what} is {limit}", hint="give a number, 0 or more")
    if not has_reference and (max_kl is not None or max_perplexity_ratio is not None):
        raise UsageError("a limit needs a reference to compare with", hint="give the 16-bit model with --reference")


def check_limit(what: str, limit: float, measured: list[tuple[str, Interval | None]]) -> None:
    """UsageError if the limit is no number or there is nothing it could be compared with."""
    if math.isnan(limit) or limit < 0:
        raise UsageError(f"the limit for the {what} is {limit}", hint="give a number, 0 or more")
    if not measured:
        raise UsageError(f"no text was evaluated, so there is no {what} to check", hint="give a text")
    if any(interval is None for _, interval in measured):
        raise UsageError(f"there is no {what} without a reference", hint="give the 16-bit model with --reference")


def describe(interval: Interval) -> str:
    """`0.12 (95 % interval 0.1 to 0.14)`."""
    if math.isnan(interval.low) or math.isnan(interval.high):
        return f"{interval.value:.6g}"
    return f"{interval.value:.6g} (95 % interval {interval.low:.4g} to {interval.high:.4g})"
