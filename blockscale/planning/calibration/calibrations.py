"""Which measurements a prediction is fitted to: those given now, the user's own of before, or the package's."""

from collections.abc import Sequence
from pathlib import Path

from blockscale.planning.calibration.calibrate import Calibration, calibrate, main_format, replica_of
from blockscale.planning.calibration.measurements import read_measurements
from blockscale.planning.calibration.store import load_calibration, save_calibration
from blockscale.planning.speed.layout import Layout
from blockscale.planning.speed.predict import Priors, Workload, default_priors
from blockscale.planning.speed.roofline import Deployment

Key = tuple[str, str]


class Calibrations:
    """Of one engine and version. Each GPU and format is looked up once.

    file  where calibrations are kept; None: the user's own file
    """

    def __init__(self, engine: str | None, version: str | None, file: Path | None) -> None:
        self._engine, self._version, self._file = engine, version, file
        self._known: dict[Key, Calibration | None] = {}

    def add(self, runs: Sequence[str | Path], d: Deployment) -> None:
        """Fits to an engine's benchmark files, and keeps the fit. UsageError where they do not suffice."""
        found = calibrate(runs, d, engine=self._engine, version=self._version)
        save_calibration(found, self._file)
        self._known[_key(d)] = found

    def priors_for(self, d: Deployment) -> Priors:
        found = self._for(d)
        return default_priors() if found is None else found.priors_for(d.layout)

    def notices_for(self, d: Deployment, sequences: float | None, workload: Workload) -> tuple[str, ...]:
        """What a reader of calibrated predictions should know. `sequences`: that a replica decodes together."""
        found = self._for(d)
        if found is None:
            if self._file is None:
                return ()
            what = f"{d.architecture.name} in {main_format(d)} on {d.gpu.name}"
            return (f"{self._file} holds no calibration for {what}: predicted from published measurements",)
        error = (
            f"calibrated on {found.num_runs} runs of {found.name} ({found.date}): mean error of these runs "
            f"{found.error_before:.0%} before, {found.error_after:.0%} after, each predicted from the others"
        )
        said = [error, *found.notices]
        if not found.holds(d.layout):
            said.append(
                f"the calibration has seen {', '.join(found.layouts)}, not {replica_of(d.layout).name}: intervals are "
                "as without one"
            )
        beyond = "" if sequences is None or found.reach is None else found.reach.beyond(sequences, workload)
        if beyond:
            said.append(f"far outside what the calibration has seen ({beyond}): intervals are as without one")
        return tuple(said)

    def _for(self, d: Deployment) -> Calibration | None:
        key = _key(d)
        if key not in self._known:
            self._known[key] = load_calibration(d, self._engine, self._version, self._file)
        return self._known[key]


def measured_layout(files: Sequence[str | Path]) -> Layout | None:
    """Of a replica, as the first run that says it has it."""
    layouts = (m.layout for file in files for m in read_measurements(Path(file)) if m.layout is not None)
    return next(map(replica_of, layouts), None)


def _key(d: Deployment) -> Key:
    return d.gpu.key, main_format(d)
