"""What the numbers of a report say, in plain sentences."""

import math

from blockscale.evaluation.result import Report, TaskComparison

SIGNIFICANCE = 0.05  # the counterpart of 95 % intervals


def reading(report: Report) -> list[str]:
    """Sentences for the top of the report, in the order of weight. Nothing is said about what was not measured."""
    parts = [read_perplexity(report), read_divergence(report), read_agreement(report)]
    parts += [read_task(comparison) for comparison in report.task_comparisons]
    parts.append(read_layers(report))
    parts += [f"Note: {notice}." for notice in report.notices]
    if report.texts:
        parts.append(
            "Intervals come from drawing whole windows of these texts again and again. They say how far the figures "
            "would move on other parts of the same kind of text, and nothing about other kinds of text or languages."
        )
    return [part for part in parts if part]


def percent(fraction: float) -> str:
    """`3.2 %`, with more digits for small figures."""
    digits = 1 if abs(fraction) >= 0.01 else 2 if abs(fraction) >= 0.001 else 3
    return f"{100 * fraction:.{digits}f} %"


def listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def read_perplexity(report: Report) -> str:
    value, ratio = report.perplexity, report.perplexity_ratio
    if value is None:
        return ""
    if not math.isfinite(value):
        return "The model's perplexity is not a finite number on at least one text: the model is broken there."
    if ratio is None or not math.isfinite(ratio):
        return f"The model's perplexity is {value:.4g}; without a reference, that says nothing about what was lost."
    known = [(t.name, t.perplexity_ratio) for t in report.texts if t.perplexity_ratio is not None]
    clear = [name for name, interval in known if interval.low > 1 or interval.high < 1]
    unclear = [name for name, interval in known if interval.low <= 1 <= interval.high]
    both = f"({value:.4g} against {report.reference_perplexity:.4g})"
    if ratio == 1:
        text = f"Perplexity is exactly the reference's {both}. "
    else:
        way = "higher" if ratio > 1 else "lower"
        text = f"Perplexity is {percent(abs(ratio - 1))} {way} than the reference's {both}. "
    if clear:
        text += f"On {listed(clear)} the difference is larger than chance explains. "
    if unclear:
        text += f"On {listed(unclear)} the interval of the ratio includes 1: so little text cannot tell the two apart."
    return text.strip()


def read_divergence(report: Report) -> str:
    kl = report.kl_mean
    if kl is None or not math.isfinite(kl):
        return ""
    worst = [t.kl_p99 for t in report.texts if t.kl_p99 is not None and math.isfinite(t.kl_p99)]
    text = f"The KL divergence is {kl:.3g} nats a token: a text that the reference itself writes looks "
    text += f"{percent(-math.expm1(-kl))} less likely to this model, token for token."
    if worst:
        text += f" One token in a hundred diverges by more than {max(worst):.3g} nats."
    return text


def read_agreement(report: Report) -> str:
    same = report.top1_agreement
    if same is None or not math.isfinite(same):
        return ""
    text = f"On {percent(same)} of the tokens both models have the same first choice"
    if same >= 1:
        return text + "."
    return text + f": with the same text before it, about one greedy token in {max(1, round(1 / (1 - same)))} differs."


def read_task(comparison: TaskComparison) -> str:
    text = f"On {comparison.name}, {comparison.metric} is {comparison.score:.3g} against "
    text += f"{comparison.reference_score:.3g} for the reference"
    if comparison.p_value is None:
        return text + "."
    text += f" ({comparison.num_gained} right answers gained, {comparison.num_lost} lost): "
    if comparison.p_value < SIGNIFICANCE:
        return text + f"more than chance explains (p = {comparison.p_value:.2g})."
    return text + f"no more than chance explains (p = {comparison.p_value:.2g})."


def read_layers(report: Report) -> str:
    finite = [layer for layer in report.layers if math.isfinite(layer.sqnr_db)]
    if not finite:
        return ""
    worst = min(finite, key=lambda layer: layer.sqnr_db)
    total = sum(layer.num_parameters for layer in finite)
    mean = sum(layer.sqnr_db * layer.num_parameters for layer in finite) / total if total else worst.sqnr_db
    return (
        f"The weights' signal lies {mean:.1f} dB above their rounding error on average; the lowest, "
        f"{worst.sqnr_db:.1f} dB, is {worst.name}. Six decibels are one bit."
    )
