"""Predictions of the planner against published measurements of serving.

    pip download --no-deps aiconfigurator-core==0.12.0 && unzip aiconfigurator_core-*.whl 'aiconfigurator_core/*'
    python benchmarks/planner_accuracy.py --sample aiconfigurator_core/systems/silicon_sample.csv

The sample is a table of about 7,000 published rows; the models' configs lie beside it. `--fit` finds the efficiencies
anew and prints them; what is recorded otherwise is how far those of the package, fits that have not seen a model or a
GPU, and calibrations on eight points are from the measurements.
"""

import argparse
import csv
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from published_points import Point, max_load_points, read_sample
from record import RESULTS, record
from scipy.optimize import least_squares

from blockscale.planning.calibration.calibrate import Run, fit_runs
from blockscale.planning.speed.predict import Priors, default_priors, predict
from blockscale.planning.speed.roofline import Efficiency, serve

NAMES = [f.name for f in fields(Efficiency)]
START = Efficiency(
    weights=0.8,
    experts=0.6,
    cache=0.5,
    compute=0.6,
    prefill=0.6,
    narrow=0.4,
    link=0.5,
    layer_s=3e-5,
    expert_layer_s=3e-5,
    reduce_s=8e-6,
    exchange_s=3e-5,
    step_s=1e-3,
    sequence_s=5e-6,
    alone=0.5,
    ahead=0.05,
)
LOWEST = np.log([0.3, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05, 1e-6, 1e-6, 1e-6, 1e-6, 1e-5, 1e-7, 0.02, 0.001])
HIGHEST = np.log([1, 1, 1, 1, 1, 1, 1, 2e-4, 4e-4, 1e-4, 4e-4, 1e-2, 1e-4, 1, 0.5])
NUM_CALIBRATION, NUM_DRAWS, SMALLEST_GROUP = 8, 4, 24
FITTED_POINTS = 1300


def is_fitted(p: Point) -> bool:
    """GLM-5's attention is sparse, which the model does not know; the rows of the others contradict all like them."""
    return not p.model.startswith(("zhipuai/", "nvidia/")) and p.gpu != "gb200"


Array = NDArray[np.float64]


def residuals(points: Sequence[Point], e: Efficiency) -> tuple[Array, Array]:
    """log(predicted / measured) of ITL, and of TTFT where it was measured."""
    itl, ttft = [], []
    for p in points:
        served = serve(p.deployment, e, p.sequences, p.input_tokens, p.output_tokens)
        itl.append(math.log(served.itl_s / p.itl_s))
        if p.ttft_s:
            ttft.append(math.log(served.ttft_s / p.ttft_s))
    return np.array(itl), np.array(ttft)


def max_load_residuals(e: Efficiency) -> Array:
    found = []
    priors = Priors(e, default_priors().spread)
    for d, workload, measured in max_load_points():
        found.append(math.log(predict(d, workload, priors).tokens_per_s_per_gpu.value / measured))
    return np.array(found)


def fit_all(points: Sequence[Point], num_points: int, evaluations: int, seed: int = 3) -> Efficiency:
    """One set of efficiencies: weak prior, groups weighed by the root of their size, outliers damped."""
    groups = Counter(p.group for p in points)
    chosen = random.Random(seed).sample(list(points), min(num_points, len(points)))
    weight = np.sqrt(np.array([groups[p.group] ** -0.5 for p in chosen]))
    weight /= math.sqrt(float(np.mean(weight**2)))
    prior = np.log([getattr(START, name) for name in NAMES])

    def weighed(x: Array) -> Array:
        e = Efficiency(*np.exp(x).tolist())
        found = []
        for p, w in zip(chosen, weight, strict=True):
            served = serve(p.deployment, e, p.sequences, p.input_tokens, p.output_tokens)
            found.append(w * math.log(served.itl_s / p.itl_s))
            found.append(w * 0.4 * max(-1.5, min(1.5, math.log(served.ttft_s / p.ttft_s))) if p.ttft_s else 0.0)
        return np.concatenate([found, 0.3 * (x - prior), 4.0 * max_load_residuals(e)])

    start = np.clip(prior, LOWEST + 1e-6, HIGHEST - 1e-6)
    solved = least_squares(weighed, start, bounds=(LOWEST, HIGHEST), loss="soft_l1", f_scale=0.3, max_nfev=evaluations)
    return Efficiency(*np.exp(solved.x).tolist())


def figures(r: Array, half_width: float | Array) -> dict[str, Any]:
    """Of logarithms: mean and median of |predicted / measured - 1|, bias, share within the interval."""
    error = np.abs(np.exp(r) - 1)
    return {
        "points": len(r),
        "mean_error": round(float(error.mean()), 4),
        "median_error": round(float(np.median(error)), 4),
        "bias": round(float(np.exp(r.mean()) - 1), 4),
        "inside_80": round(float((np.abs(r) <= half_width).mean()), 3),
        "half_width_that_holds_80": round(float(np.quantile(np.abs(r), 0.8)), 3),
    }


def by(points: Sequence[Point], key: Callable[[Point], str]) -> Iterable[tuple[str, list[Point]]]:
    found: dict[str, list[Point]] = defaultdict(list)
    for p in points:
        found[key(p)].append(p)
    return sorted(found.items())


KEYS: dict[str, Callable[[Point], str]] = {
    "model": lambda p: p.model,
    "gpu": lambda p: p.gpu,
    "engine": lambda p: p.engine,
    "format": lambda p: p.format,
}


def uncalibrated(points: Sequence[Point]) -> dict[str, Any]:
    priors = default_priors()
    e, spread = priors.efficiency, priors.spread
    itl, ttft = residuals(points, e)
    result: dict[str, Any] = {"itl": figures(itl, spread.itl), "ttft": figures(ttft, spread.ttft)}
    for name, key in KEYS.items():
        result[f"itl_by_{name}"] = {k: figures(residuals(ps, e)[0], spread.itl) for k, ps in by(points, key)}
    result["max_load"] = figures(max_load_residuals(e), spread.itl)
    return result


def held_out(points: Sequence[Point]) -> dict[str, Any]:
    """Each model, then each GPU, predicted by a fit that has not seen it."""
    spread = default_priors().spread
    result = {}
    for name in ("model", "gpu"):
        pooled: list[Array] = []
        queue: list[Array] = []
        rows = {}
        for group, own in by(points, KEYS[name]):
            others = [p for p in points if KEYS[name](p) != group and is_fitted(p)]
            itl, ttft = residuals(own, fit_all(others, 500, 25))
            rows[group] = figures(itl, spread.itl)
            pooled.append(itl)
            queue.append(ttft)
            print(name, group, rows[group]["mean_error"], flush=True)
        result[name] = {
            "all": figures(np.concatenate(pooled), spread.itl),
            "ttft": figures(np.concatenate(queue), spread.ttft),
            "groups": rows,
        }
    return result


def calibrated(points: Sequence[Point], key: Callable[[Point], str]) -> dict[str, Any]:
    """Eight random points of a group calibrate, all others of it are predicted."""
    draw = random.Random(7)
    base = default_priors().efficiency
    rows: dict[str, Any] = {}
    pools: dict[str, list[Array]] = defaultdict(list)
    for group, own in by(points, key):
        if len(own) < SMALLEST_GROUP:
            continue
        errors = []
        for _ in range(NUM_DRAWS):
            chosen = set(draw.sample(range(len(own)), NUM_CALIBRATION))
            found = fit_runs([Run(own[i].deployment, own[i].measurement) for i in sorted(chosen)])
            rest = [p for i, p in enumerate(own) if i not in chosen]
            itl, ttft = residuals(rest, found.efficiency)
            errors.append(float(np.abs(np.exp(itl) - 1).mean()))
            pools["itl"].append(itl)
            pools["itl_width"].append(np.full(len(itl), found.spread.itl))
            pools["ttft"].append(ttft)
            pools["ttft_width"].append(np.full(len(ttft), found.spread.ttft))
        rows[group] = {
            "points": len(own),
            "uncalibrated": round(float(np.abs(np.exp(residuals(own, base)[0]) - 1).mean()), 4),
            "calibrated": round(float(np.mean(errors)), 4),
            "worst_draw": round(max(errors), 4),
        }
    pooled = {name: np.concatenate(arrays) for name, arrays in pools.items()}
    return {
        "itl": figures(pooled["itl"], pooled["itl_width"]),
        "ttft": figures(pooled["ttft"], pooled["ttft_width"]),
        "mean_of_groups": round(float(np.mean([row["calibrated"] for row in rows.values()])), 4),
        "mean_half_width": round(float(pooled["itl_width"].mean()), 3),
        "groups": rows,
    }


def carried_over(points: Sequence[Point]) -> dict[str, Any]:
    """Eight points of one model calibrate, those of another on the same GPU, engine and format are predicted."""
    draw = random.Random(1)
    base = default_priors().efficiency
    before: list[float] = []
    after: list[float] = []
    for _, own in by(points, lambda p: f"{p.gpu} {p.engine} {p.format}"):
        models = dict(by(own, KEYS["model"]))
        for name in [name for name, ps in models.items() if len(ps) >= SMALLEST_GROUP and len(models) > 1]:
            chosen = draw.sample(models[name], NUM_CALIBRATION)
            found = fit_runs([Run(p.deployment, p.measurement) for p in chosen])
            for other in (ps for key, ps in models.items() if key != name):
                before.append(float(np.abs(np.exp(residuals(other, base)[0]) - 1).mean()))
                after.append(float(np.abs(np.exp(residuals(other, found.efficiency)[0]) - 1).mean()))
    return {
        "pairs": len(after),
        "uncalibrated": round(float(np.mean(before)), 4),
        "calibrated_on_another": round(float(np.mean(after)), 4),
    }


def against_peer(points: Sequence[Point], path: Path) -> dict[str, Any]:
    """Both on the rows that planner_peer.py has predictions for."""
    with path.open(newline="") as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    asked = [p for p in points if p.key in rows]
    known = [p for p in asked if rows[p.key]["mode"]]
    itl = np.array([math.log(float(rows[p.key]["tpot_ms"]) / 1e3 / p.itl_s) for p in known])
    ttft = np.array([math.log(float(rows[p.key]["ttft_ms"]) / 1e3 / p.ttft_s) for p in known if p.ttft_s])
    own_itl, own_ttft = residuals(known, default_priors().efficiency)
    spread = default_priors().spread

    def error(kept: Callable[[Point], bool]) -> dict[str, Any]:
        at = [i for i, p in enumerate(known) if kept(p)]
        rows = {"aiconfigurator": itl[at], "blockscale": own_itl[at]}
        return {"points": len(at), **{name: round(float(np.abs(np.exp(r) - 1).mean()), 4) for name, r in rows.items()}}

    engines = {engine: error(lambda p, e=engine: p.engine == e) for engine in sorted({p.engine for p in known})}
    return {
        "rows_asked": len(asked),
        "rows_without_an_answer": len(asked) - len(known),
        "modes": dict(Counter(rows[p.key]["mode"] for p in known)),
        "aiconfigurator": {"itl": figures(itl, spread.itl), "ttft": figures(ttft, spread.ttft)},
        "blockscale": {"itl": figures(own_itl, spread.itl), "ttft": figures(own_ttft, spread.ttft)},
        "itl_by_engine": engines,
        "itl_without_gpt_oss": error(lambda p: not p.model.startswith("openai/")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=Path, required=True)
    parser.add_argument("--configs", type=Path, help="folder of the models' configs; default: near SAMPLE")
    parser.add_argument("--peer", type=Path, help="what planner_peer.py wrote")
    parser.add_argument("--only", nargs="*", help="measure these sections again, and keep the others as recorded")
    parser.add_argument("--fit", action="store_true", help="find the efficiencies anew, print them and stop")
    args = parser.parse_args()
    points, left_out = read_sample(args.sample, args.configs or args.sample.parents[1] / "model_configs")
    print(len(points), "points; left out:", dict(left_out))
    if args.fit:
        e = fit_all([p for p in points if is_fitted(p)], FITTED_POINTS, 40)
        print("\n".join(f"{name} = {getattr(e, name):.3g}" for name in NAMES))
        print("ITL", figures(residuals(points, e)[0], default_priors().spread.itl))
        print("max load", np.exp(max_load_residuals(e)).round(2))
        return
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "uncalibrated": lambda: uncalibrated(points),
        "calibrated_on_8_same_model": lambda: calibrated(points, lambda p: f"{p.model} {p.gpu} {p.engine} {p.format}"),
        "calibrated_on_8_models_mixed": lambda: calibrated(points, lambda p: f"{p.gpu} {p.engine} {p.format}"),
        "carried_over_to_another_model": lambda: carried_over(points),
        "held_out": lambda: held_out(points),
    }
    if args.peer is not None:
        sections["against_aiconfigurator"] = lambda: against_peer(points, args.peer)
    result: dict[str, Any] = {"sample": {"file": args.sample.name, "points": len(points), "left_out": dict(left_out)}}
    file = RESULTS / "planner_accuracy.json"
    if args.only and file.exists():
        result |= json.loads(file.read_text())["figures"]
    for name, measure in sections.items():
        if not args.only or name in args.only:
            result[name] = measure()
            print(name, {key: value for key, value in result[name].items() if "by_" not in key and key != "groups"})
            record("planner_accuracy", result)


if __name__ == "__main__":
    main()
