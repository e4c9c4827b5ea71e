"""Fits the efficiencies to a user's own measurements: one model under one engine on one GPU in one format.

The fit is least squares in log space. Each efficiency is drawn to the package's own as if that had been measured with
an error of `_PRIOR_SD`, so that a few runs correct what they can see and leave the rest. How far the fit may still be
off is judged on each run by a fit to all the others.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from blockscale.errors import UsageError
from blockscale.planning.calibration.identity import check_format, check_model
from blockscale.planning.calibration.measurements import Measurement, read_measurements
from blockscale.planning.hardware.catalogue import Gpu, find_gpu
from blockscale.planning.models.architecture import LINEAR_PARTS, Architecture
from blockscale.planning.speed.layout import Layout, check_layout
from blockscale.planning.speed.memory import plan_memory
from blockscale.planning.speed.predict import Priors, Reach, Spread, calibrated_spread, default_priors
from blockscale.planning.speed.roofline import Deployment, Efficiency, serve

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PRIOR_SD = 0.3  # of an efficiency's logarithm between engines, GPUs and models
_ITL_SD, _TTFT_SD = 0.08, 0.4  # of what is left after a good fit
_SHARES = ("weights", "experts", "cache", "compute", "prefill", "narrow", "link", "alone")  # at most 1
_OUTLIER = 1.5  # residuals beyond so many standard deviations count linearly
_MAX_REFITS = 32
_NORMAL_80 = 1.2816  # half an 80 % interval, in standard deviations
_SUSPICIOUS = 0.35


@dataclass(frozen=True)
class Run:
    """A measurement and the deployment it was made on."""

    deployment: Deployment
    measurement: Measurement


@dataclass(frozen=True)
class Calibration:
    """What was fitted, and to what.

    gpu, format    catalogue key; format of most bytes of the layers
    version        of the engine; None where no file names it
    shape          of the model: a calibration does not carry over to another one
    error_before   mean of |predicted / measured - 1| of ITL (TTFT where no run has ITL) with the package's priors
    error_after    the same, each run predicted from the others
    layouts        of a replica, that were measured
    reach          what the runs spanned; None: not known
    """

    gpu: str
    engine: str
    version: str | None
    format: str
    model: str
    shape: str
    num_runs: int
    efficiency: Efficiency
    spread: Spread
    error_before: float
    error_after: float
    date: str
    notices: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    reach: Reach | None = None

    @property
    def priors(self) -> Priors:
        source = f"calibrated on {self.num_runs} runs of {self.name}, {self.date}"
        return Priors(self.efficiency, self.spread, source, self.reach, default_priors().spread)

    def priors_for(self, layout: Layout) -> Priors:
        """In a layout that was not measured, the interval is that of predictions without a calibration."""
        return self.priors if self.holds(layout) else replace(self.priors, spread=default_priors().spread)

    def holds(self, layout: Layout) -> bool:
        return not self.layouts or replica_of(layout).name in self.layouts

    @property
    def name(self) -> str:
        version = "" if self.version is None else f" {self.version}"
        return f"{self.engine}{version} on {self.gpu}, {self.model} in {self.format}"


def fit(
    files: Sequence[str | Path],
    deployment: Deployment,
    *,
    engine: str | None = None,
    version: str | None = None,
    base: Priors | None = None,
) -> Priors:
    """The priors that `calibrate` finds."""
    return calibrate(files, deployment, engine=engine, version=version, base=base).priors


def calibrate(
    files: Sequence[str | Path],
    deployment: Deployment,
    *,
    engine: str | None = None,
    version: str | None = None,
    base: Priors | None = None,
) -> Calibration:
    """Fits to every run in `files`.

    deployment       what was measured; a layout that a file names goes before its own
    engine, version  what is asked for: UsageError where the files are of another

    UsageError for a run on another GPU, of another model or in another format or layout, where it says so; for engines
    or versions mixed, and for fewer figures than there are parameters.
    """
    measured = [m for file in files for m in read_measurements(Path(file))]
    own_engine = _one({m.engine for m in measured}, engine, "engine")
    own_version = _one({m.version for m in measured if m.version}, version, "engine version")
    for m in measured:
        if m.gpu is not None and not is_named(deployment.gpu, m.gpu):
            raise UsageError(
                f"{m.where}: measured on {m.gpu}, and the plan is for {deployment.gpu.name}",
                hint="calibrate each GPU with its own runs",
            )
        check_model(m.model, m.where, deployment.architecture)
        check_format(m.format, m.where, main_format(deployment))
    runs = [Run(_deployed(deployment, m.layout), m) for m in measured]
    _check_layouts(deployment.layout, [run.deployment.layout for run in runs])
    found = fit_runs(runs, base)
    notices = []
    if own_version is None:
        notices.append(f"no file names the version of {own_engine}: measure again after each update")
    if found.error_after > _SUSPICIOUS:
        notices.append(
            f"runs lie {found.error_after:.0%} from what the others predict: are model, format and layout those "
            "that were measured?"
        )
    return Calibration(
        deployment.gpu.key,
        own_engine or "an engine",
        own_version,
        main_format(deployment),
        deployment.architecture.name,
        shape_of(deployment.architecture),
        len(runs),
        found.efficiency,
        found.spread,
        found.error_before,
        found.error_after,
        date.today().isoformat(),
        tuple(notices),
        tuple(dict.fromkeys(replica_of(run.deployment.layout).name for run in runs)),
        _reach(runs),
    )


def replica_of(layout: Layout) -> Layout:
    """One copy of it."""
    return replace(layout, replicas=1)


def _check_layouts(planned: Layout, measured: Sequence[Layout]) -> None:
    """Efficiencies of one layout help to predict another; those of others alone do not."""
    if replica_of(planned) not in [replica_of(layout) for layout in measured]:
        names = ", ".join(dict.fromkeys(replica_of(layout).name for layout in measured))
        raise UsageError(
            f"the runs were measured as {names}, and the plan is for {replica_of(planned).name}",
            hint=f"--layout {replica_of(measured[0]).name}, or runs of {replica_of(planned).name} among the others",
        )


def _reach(runs: Sequence[Run]) -> Reach:
    spanned = zip(*(_point(run)[1:4] for run in runs), strict=True)
    return Reach(*((min(each), max(each)) for each in spanned))


def _one(found: set[str], asked: str | None, what: str) -> str | None:
    if len(found) > 1:
        raise UsageError(f"runs of more than one {what}: {', '.join(sorted(found))}", hint="calibrate each by itself")
    own = next(iter(found), None)
    if asked is not None and own is not None and own != asked:
        raise UsageError(f"the runs are of {what} {own}, and {asked} is asked for", hint="measure that one")
    return own or asked


def _deployed(d: Deployment, layout: Layout | None) -> Deployment:
    if layout is None:
        return d
    check_layout(layout, d.architecture)
    return replace(d, layout=layout)


def main_format(d: Deployment) -> str:
    """The format of most bytes of the layers' weights."""
    sizes: dict[str, int] = {}
    for part in LINEAR_PARTS:
        if part in d.weights.parts:
            own = d.weights.parts[part]
            sizes[own.format] = sizes.get(own.format, 0) + own.num_bytes
    return max(sizes, key=lambda fmt: sizes[fmt], default="bf16")


def shape_of(a: Architecture) -> str:
    """What a model and its fine-tuned editions have in common, under whatever name."""
    return f"{a.num_layers} layers of {a.hidden}, {a.num_parameters} parameters"


def is_named(gpu: Gpu, text: str) -> bool:
    """Whether `text`, a catalogue name or a driver's (`NVIDIA H100 80GB HBM3`), can mean this GPU."""
    try:
        return find_gpu(text).key == gpu.key
    except UsageError:
        models = {word for word in _words(gpu.name) if any(c.isdigit() for c in word) and not word.endswith("gb")}
        return not models or bool(models & _words(text))


def _words(name: str) -> set[str]:
    return set("".join(c if c.isalnum() else " " for c in name.lower()).split())


@dataclass(frozen=True)
class Fit:
    """`error_after`: each run predicted by a fit to the others."""

    efficiency: Efficiency
    spread: Spread
    error_before: float
    error_after: float


def fit_runs(runs: Sequence[Run], base: Priors | None = None) -> Fit:
    """UsageError for fewer figures (ITL and TTFT count as one each) than efficiencies that they depend on."""
    base = base or default_priors()
    names = free_parameters([run.deployment for run in runs])
    num_figures = sum(run.measurement.num_figures for run in runs)
    if num_figures < len(names):
        raise UsageError(
            f"{len(runs)} runs with {num_figures} figures cannot fit {len(names)} efficiencies",
            hint="measure more concurrencies and lengths: eight runs are enough",
        )
    points = [_point(run) for run in runs]
    before = [_residuals(point, base.efficiency) for point in points]
    efficiency = _solve(points, names, base.efficiency)
    if len(points) <= _MAX_REFITS:
        others = (points[:i] + points[i + 1 :] for i in range(len(points)))
        after = [_residuals(p, _solve(rest, names, base.efficiency)) for p, rest in zip(points, others, strict=True)]
    else:  # one run of many moves nothing
        after = [_residuals(point, efficiency) for point in points]
    floor = calibrated_spread()
    return Fit(
        efficiency,
        Spread(_spread(after, 0, floor.itl, base.spread.itl), _spread(after, 1, floor.ttft, base.spread.ttft)),
        _mean_error(before),
        _mean_error(after),
    )


def free_parameters(deployments: Sequence[Deployment]) -> list[str]:
    """The efficiencies that these deployments show. Costs of a step and of a layer cannot be told apart; the layer's
    stands for both."""
    names = ["weights", "cache", "compute", "prefill", "layer_s", "sequence_s", "alone", "ahead"]
    layouts = [d.layout for d in deployments]
    if any(layout.tensor > 1 for layout in layouts):
        names.append("reduce_s")
    if any(layout.gpus_per_replica > 1 for layout in layouts):
        names.append("link")
    if any(block.is_moe for d in deployments for block in d.architecture.blocks):
        names += ["experts", "narrow"]
    if any(layout.attention_data > 1 for layout in layouts):
        names.append("exchange_s")
    return names


_Point = tuple[Deployment, float, float, float, float | None, float | None]


def _point(run: Run) -> _Point:
    """Deployment, sequences a replica, input, output, ITL, TTFT. Where not all requests are admitted, TTFT is a queue's
    and says nothing."""
    d, m = run.deployment, run.measurement
    sequences = max(m.sequences / d.layout.replicas, 1.0)
    most = plan_memory(d, math.ceil(m.input_tokens + m.output_tokens)).max_sequences
    if 0 < most < sequences:
        return d, float(most), m.input_tokens, m.output_tokens, m.itl_s, None
    return d, sequences, m.input_tokens, m.output_tokens, m.itl_s, m.ttft_s


def _residuals(point: _Point, e: Efficiency) -> tuple[float | None, float | None]:
    """log(predicted / measured) of ITL and TTFT."""
    d, sequences, num_input, num_output, itl_s, ttft_s = point
    served = serve(d, e, sequences, num_input, num_output)
    return (
        None if itl_s is None else math.log(served.itl_s / itl_s),
        None if ttft_s is None else math.log(served.ttft_s / ttft_s),
    )


def _solve(points: Sequence[_Point], names: Sequence[str], base: Efficiency) -> Efficiency:
    import numpy as np
    from scipy.optimize import least_squares

    def weighed(z: "NDArray[np.float64]") -> "NDArray[np.float64]":
        e = moved(z.tolist())
        found: list[float] = []
        for point in points:
            itl, ttft = _residuals(point, e)
            found.append(0.0 if itl is None else itl / _ITL_SD)
            found.append(0.0 if ttft is None else ttft / _TTFT_SD)
        return np.concatenate([found, z])

    moved = _mover(names, base)
    solved = least_squares(weighed, np.zeros(len(names)), loss="soft_l1", f_scale=_OUTLIER, max_nfev=20)
    return moved(solved.x.tolist())


def _mover(names: Sequence[str], base: Efficiency) -> Callable[[Sequence[float]], Efficiency]:
    """From standard deviations of the prior to efficiencies."""

    def moved(z: Sequence[float]) -> Efficiency:
        values = {f.name: getattr(base, f.name) for f in fields(base)}
        for name, step in zip(names, z, strict=True):
            value = values[name] * math.exp(_PRIOR_SD * float(step))
            values[name] = min(value, 1.0) if name in _SHARES else value
        return Efficiency(**values)

    return moved


def _spread(residuals: Sequence[tuple[float | None, float | None]], column: int, least: float, without: float) -> float:
    """Half an 80 % interval: never below what calibrations are known to reach on runs they have not seen."""
    values = [value for pair in residuals if (value := pair[column]) is not None]
    if not values:
        return without
    clipped = [min(abs(value), without) for value in values]  # one wild run is an outlier, not the spread
    return max(least, _NORMAL_80 * math.sqrt(sum(value**2 for value in clipped) / len(clipped)))


def _mean_error(residuals: Sequence[tuple[float | None, float | None]]) -> float:
    itl = [pair[0] for pair in residuals if pair[0] is not None]
    values = itl or [pair[1] for pair in residuals if pair[1] is not None]
    return sum(abs(math.exp(value) - 1) for value in values) / len(values)
