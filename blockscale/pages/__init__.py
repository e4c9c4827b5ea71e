"""HTML pages that need nothing else: no script, no font and no picture from anywhere. Their figures and their look."""

import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from blockscale.errors import OutputError

DASH = "–"  # where nothing was measured


def number(x: float | None, digits: int = 4) -> str:
    """`digits` significant ones."""
    if x is None:
        return DASH
    if not math.isfinite(x):
        return "not finite"
    return f"{x:#.{digits}g}".rstrip(".") if abs(x) < 10**digits else f"{x:,.0f}"


def percentage(x: float | None) -> str:
    return DASH if x is None else f"{100 * x:.2f} %" if math.isfinite(x) else "not finite"


def size(num_bytes: int | None) -> str:
    """Decimal units, as disks and model cards have them."""
    return DASH if num_bytes is None else _with_unit(num_bytes, ("B", "kB", "MB", "GB", "TB", "PB"))


def count(n: int | None) -> str:
    """Of parameters: 671.03 B is 671.03e9."""
    return DASH if n is None else _with_unit(n, ("", "k", "M", "B", "T"))


def _with_unit(n: int, units: tuple[str, ...]) -> str:
    value, index = float(n), 0
    while value >= 1000 and index < len(units) - 1:
        value, index = value / 1000, index + 1
    return (f"{value:.2f} {units[index]}" if index else f"{n} {units[0]}").rstrip()


Filters = Mapping[str, Callable[..., str]]


def render_page(template: str, filters: Filters, **values: object) -> str:
    """`template`: its path below the package. What is filled in is escaped, whatever a model or a file is called.

    Every template can include `pages/style.css`.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("blockscale", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, percentage=percentage, size=size, count=count, **filters)
    return environment.get_template(template).render(**values)


def write_page(page: str, path: str | Path) -> None:
    """The file appears whole or not at all. OutputError where it cannot be written."""
    path = Path(path)
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        # half a surrogate pair, which a name in a file may hold, is shown as an escape
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(page)
        os.chmod(temporary, 0o644)  # mkstemp's own mode would keep others from reading it
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise OutputError(
            f"cannot write the page {path}: {error.strerror or error}", hint="check the path and its rights"
        ) from error
