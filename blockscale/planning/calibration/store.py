"""Where calibrations are kept: one JSON file, the user's own or one that is named."""

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blockscale.errors import OutputError, UsageError
from blockscale.planning.calibration.calibrate import Calibration, main_format, shape_of
from blockscale.planning.speed.predict import Reach, Spread
from blockscale.planning.speed.roofline import Deployment, Efficiency


def default_calibration_file() -> Path:
    """`calibrations.json` in BLOCKSCALE_CONFIG, or in blockscale under XDG_CONFIG_HOME or ~/.config."""
    if "BLOCKSCALE_CONFIG" in os.environ:
        return Path(os.environ["BLOCKSCALE_CONFIG"]) / "calibrations.json"
    return Path(os.environ.get("XDG_CONFIG_HOME", Path.home() / ".config")) / "blockscale" / "calibrations.json"


def save_calibration(calibration: Calibration, path: Path | None = None) -> Path:
    """Adds it to the file, in the place of an older one of the same model, GPU, engine, version and format."""
    path = path or default_calibration_file()
    kept = [c for c in read_calibrations(path) if _key(c) != _key(calibration)] if path.exists() else []
    text = json.dumps({"calibrations": [asdict(c) for c in (*kept, calibration)]}, indent=1) + "\n"
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as e:
        raise OutputError(f"{path}: cannot be written: {e.strerror}", hint="check the path and its rights") from e
    return path


def load_calibration(
    deployment: Deployment, engine: str | None = None, version: str | None = None, path: Path | None = None
) -> Calibration | None:
    """The newest for this model, GPU and format, and for engine and version where they are given.

    None where there is none. Of a file that is named, UsageError where it has one of another engine or version only.
    """
    file = path or default_calibration_file()
    if path is None and not file.exists():
        return None
    wanted = (deployment.gpu.key, main_format(deployment), shape_of(deployment.architecture))
    known = [c for c in read_calibrations(file) if (c.gpu, c.format, c.shape) == wanted]
    fitting = [c for c in known if engine in (None, c.engine) and (version is None or c.version in (None, version))]
    if fitting:
        return max(fitting, key=lambda c: c.date)
    if path is None or not known:
        return None
    raise UsageError(
        f"{file}: no calibration for {engine or 'the engine'}{'' if version is None else ' ' + version}",
        hint="it holds: " + "; ".join(c.name for c in known) + ". Measure anew and give --calibrate RUN.json",
    )


def read_calibrations(path: Path) -> list[Calibration]:
    """UsageError for what is no calibration file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return [_calibration(entry) for entry in content["calibrations"]]
    except OSError as e:
        raise UsageError(f"{path}: cannot be read: {e.strerror}", hint="check the path") from e
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise UsageError(f"{path}: not a calibration file: {e}", hint="make it anew with --calibrate RUN.json") from e


def _calibration(entry: dict[str, Any]) -> Calibration:
    spread, efficiency = Spread(**entry["spread"]), Efficiency(**entry["efficiency"])
    numbers = (*asdict(spread).values(), *asdict(efficiency).values(), entry["error_before"], entry["error_after"])
    if not all(isinstance(number, int | float) and 0 <= number < math.inf for number in numbers):
        raise ValueError("an efficiency is no positive number")
    notices, layouts = tuple(map(str, entry["notices"])), tuple(map(str, entry.get("layouts", ())))
    own = {"notices": notices, "layouts": layouts, "spread": spread, "efficiency": efficiency}
    if entry.get("reach") is not None:
        own["reach"] = Reach(**{name: (float(low), float(high)) for name, (low, high) in entry["reach"].items()})
    return Calibration(**{**entry, **own})


def _key(c: Calibration) -> tuple[str, str, str | None, str, str]:
    return c.gpu, c.engine, c.version, c.format, c.shape
