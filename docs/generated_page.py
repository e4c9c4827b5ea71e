"""A page of the documentation that a script makes: written, or with `--check` compared."""

import sys
from pathlib import Path


def publish(page: Path, text: str) -> int:
    """Exit code: 1 if `--check` was asked for and the page is another."""
    if "--check" in sys.argv:
        return 0 if page.is_file() and page.read_text(encoding="utf-8") == text else 1
    page.write_text(text, encoding="utf-8")
    return 0
