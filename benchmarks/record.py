"""Where a figure comes from: command, versions, date and machine, written beside it."""

import datetime
import json
import os
import platform
import re
import sys
from importlib.metadata import version
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def cpu_model() -> str:
    """Its name as Linux gives it, elsewhere the architecture."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.machine()


def gpu_model() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def provenance(command: str | None = None) -> dict[str, object]:
    """`command` defaults to this process's own, with paths cut to their last part."""
    arguments = [a if a.startswith("-") else Path(a).name for a in sys.argv[1:]]
    return {
        "command": command or " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {name: version(name) for name in ("blockscale", "torch", "transformers")},
        "python": platform.python_version(),
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "gpu": gpu_model()},
    }


def record(name: str, figures: object, results: Path = RESULTS) -> Path:
    """Writes `results`/NAME.json."""
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{name}.json"
    path.write_text(json.dumps({**provenance(), "figures": figures}, indent=1) + "\n")
    return path
