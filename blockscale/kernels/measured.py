"""Which kernel is fastest for a shape, from tables of times that `blockscale bench kernels --table` measured.

One file a GPU in `tables/`. A device without a table of its own goes by that of the nearest capability, since the
order of kernels changes less between GPUs than their times do; without any table the order of `select` decides.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from blockscale.errors import UsageError
from blockscale.kernels.device import Device
from blockscale.kernels.select import Kernel, Op

FOLDER = Path(__file__).parent / "tables"


@dataclass(frozen=True)
class Row:
    """Microseconds of each kernel for one [N, K] and M. A kernel that does not serve that M is missing."""

    op: Op
    n: int
    k: int
    m: int
    times_us: dict[Kernel, float]


@dataclass(frozen=True)
class Table:
    """What was measured on one GPU. `versions`: of torch, Triton, CUDA, the peers. `command`: how to measure again."""

    gpu: str
    capability: tuple[int, int]
    date: str
    versions: dict[str, str]
    command: str
    rows: tuple[Row, ...]


def read(path: Path) -> Table:
    """UsageError for a file that is no table."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = tuple(
            Row(
                Op(row["op"]),
                int(row["n"]),
                int(row["k"]),
                int(row["m"]),
                {Kernel(name): float(us) for name, us in row["times_us"].items()},
            )
            for row in data["rows"]
        )
        major, minor = data["capability"]
        versions = {str(k): str(v) for k, v in data["versions"].items()}
        return Table(data["gpu"], (int(major), int(minor)), data["date"], versions, data["command"], rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path}: not a table of kernel times: {error}", hint="bench kernels --table makes one"
        ) from error


def to_dict(table: Table) -> dict[str, Any]:
    """Plain data that `read` understands."""
    return {
        "gpu": table.gpu,
        "capability": list(table.capability),
        "date": table.date,
        "versions": table.versions,
        "command": table.command,
        "rows": [
            {
                "op": row.op.value,
                "n": row.n,
                "k": row.k,
                "m": row.m,
                "times_us": {kernel.value: round(us, 2) for kernel, us in row.times_us.items()},
            }
            for row in table.rows
        ],
    }


@cache
def tables(folder: Path = FOLDER) -> tuple[Table, ...]:
    """All tables of the folder."""
    return tuple(read(path) for path in sorted(folder.glob("*.json")))


def nearest_table(device: Device, among: Sequence[Table]) -> Table | None:
    """That of the same GPU, else of the nearest capability (the same major before any other); None for the CPU."""
    if device.capability is None or not among:
        return None
    own = device.capability

    def distance(table: Table) -> tuple[bool, bool, int, int]:
        major, minor = table.capability
        return table.gpu != device.name, table.capability != own, abs(major - own[0]), abs(minor - own[1])

    return min(among, key=distance)


def fastest(table: Table, op: Op, n: int, k: int, m: int, among: Sequence[Kernel]) -> Kernel | None:
    """The one of `among` with the least time at (n, k, m), or None where the table knows fewer than two of them."""
    times = estimated_us(table, op, n, k, m, among)
    return min(times, key=lambda kernel: times[kernel]) if len(times) > 1 else None


def estimated_us(table: Table, op: Op, n: int, k: int, m: int, among: Sequence[Kernel]) -> dict[Kernel, float]:
    """Microseconds of those of `among` that the table knows.

    They are those of the nearest measured [N, K] by the logarithms of its sides; between two measured M they are
    interpolated, beyond the last they grow as M does.
    """
    shapes = {(row.n, row.k) for row in table.rows if row.op is op}
    if not shapes:
        return {}
    near = min(shapes, key=lambda s: (abs(math.log(s[0] / n)) + abs(math.log(s[1] / k)), s))
    rows = sorted((r for r in table.rows if r.op is op and (r.n, r.k) == near), key=lambda r: r.m)
    return {kernel: us for kernel in among if (us := _time_at(rows, kernel, m)) is not None}


def _time_at(rows: Sequence[Row], kernel: Kernel, m: int) -> float | None:
    points = [(row.m, row.times_us[kernel]) for row in rows if kernel in row.times_us]
    if not points:
        return None
    if m <= points[0][0]:
        return points[0][1]
    for (low, low_us), (high, high_us) in pairwise(points):
        if m <= high:
            share = (m - low) / (high - low)
            return low_us + (high_us - low_us) * share
    last, last_us = points[-1]
    return last_us * m / last
