"""Writes the table of accuracy in docs/concepts/planner.md from the benchmark's recorded figures."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "concepts" / "planner.md"
FIGURES = ROOT / "benchmarks" / "results" / "planner_accuracy.json"
BEGIN, END = "<!-- accuracy: begin -->", "<!-- accuracy: end -->"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


def row(name: str, figures: dict[str, Any]) -> str:
    return (
        f"| {name} | {figures['points']:,} | {percent(figures['mean_error'])} | {percent(figures['median_error'])} | "
        f"{percent(figures['inside_80'])} |"
    )


def tables(figures: dict[str, Any]) -> str:
    known, held = figures["uncalibrated"], figures["held_out"]
    same, mixed = figures["calibrated_on_8_same_model"], figures["calibrated_on_8_models_mixed"]
    carried = figures["carried_over_to_another_model"]
    lines = [
        "| predicted | points | mean error | median error | inside the 80 % interval |",
        "|---|---|---|---|---|",
        row("ITL, the package's efficiencies", known["itl"]),
        row("ITL, each model by a fit without it", held["model"]["all"]),
        row("ITL, each GPU by a fit without it", held["gpu"]["all"]),
        row("ITL, calibrated on 8 points of the same model, GPU, engine and format", same["itl"]),
        row("ITL, calibrated on 8 points of the same GPU, engine and format, models mixed", mixed["itl"]),
        row("throughput at maximum load (the fit has seen them)", known["max_load"]),
        row("TTFT, the package's efficiencies", known["ttft"]),
        row("TTFT, each model by a fit without it", held["model"]["ttft"]),
        row("TTFT, calibrated on 8 points of the same model", same["ttft"]),
        "",
        "Points of calibrated rows are those that did not calibrate, over all draws of eight. The package's",
        "efficiencies, from which a calibration starts, have seen about half of the points. Calibrated on *another*",
        f"model of the same GPU, engine and format, the error is {percent(carried['calibrated_on_another'])}, and",
        f"{percent(carried['uncalibrated'])} without any calibration (mean over {carried['pairs']} pairs).",
        "",
        "ITL by group, with the package's efficiencies:",
        "",
        "| group | points | mean error | median error | inside the 80 % interval |",
        "|---|---|---|---|---|",
    ]
    for key in ("engine", "gpu", "format", "model"):
        lines += [row(name, group) for name, group in known[f"itl_by_{key}"].items()]
    peer = figures.get("against_aiconfigurator")
    if peer is not None:
        answered, other = peer["aiconfigurator"]["itl"]["points"], peer["itl_without_gpt_oss"]
        lines += [
            "",
            f"Against aiconfigurator 0.12.0, on {answered} of {peer['rows_asked']} rows drawn at random, those that it",
            "answers. It predicts from tables of measured kernels, which were not fitted to these rows; our fit has",
            "seen about half of the sample. Without gpt-oss, where it is far off with the formats that it chooses",
            f"itself, its mean error of ITL is {percent(other['aiconfigurator'])},",
            f"ours {percent(other['blockscale'])}.",
            "",
            "| | ITL, mean error | ITL, median error | TTFT, median error |",
            "|---|---|---|---|",
        ]
        for name in ("aiconfigurator", "blockscale"):
            itl, ttft = peer[name]["itl"], peer[name]["ttft"]
            cells = (itl["mean_error"], itl["median_error"], ttft["median_error"])
            lines.append(f"| {name} | " + " | ".join(map(percent, cells)) + " |")
    return "\n".join(lines)


def page(text: str, figures: dict[str, Any]) -> str:
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{tables(figures)}\n{END}{rest.split(END)[1]}"


def main() -> None:
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))["figures"]
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), figures), encoding="utf-8")


if __name__ == "__main__":
    main()
