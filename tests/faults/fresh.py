"""Work in a fresh process, whose memory is its own."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_TAIL = """
import json, sys
from pathlib import Path
status = Path("/proc/self/status").read_text()
peak_kb = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
print("\\n" + json.dumps({"result": result, "peak_mb": peak_kb * 1024 / 1e6}))
"""


@dataclass(frozen=True)
class Done:
    result: Any
    peak_mb: float


def run_fresh(code: str, environment: Mapping[str, str] | None = None, limit_bytes: int | None = None) -> Done:
    """Runs code that sets `result`; an exception in it fails the test. `limit_bytes` caps its address space."""

    def cap() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))

    run = subprocess.run(
        [sys.executable, "-P", "-c", code + _TAIL],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        preexec_fn=cap,
    )
    assert run.returncode == 0, run.stderr
    line = json.loads(run.stdout.splitlines()[-1])
    return Done(line["result"], line["peak_mb"])
