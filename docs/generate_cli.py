"""Writes docs/reference/cli.md from the parser. `--check` only compares."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from generated_page import publish

from blockscale.cli.main import VERBS, build_parser

PAGE = Path(__file__).parent / "reference" / "cli.md"


def render() -> str:
    """The page: what `--help` says, for the program and each verb."""
    parser = build_parser()
    verbs = _below(parser)
    parts = ["# Command line\n", "Made by `make docs` from the program's own help.\n", _block(parser.format_help())]
    for name in VERBS:
        parts += [f"## blockscale {name}\n", _block(verbs[name].format_help())]
        for kind, own in _below(verbs[name]).items():
            parts += [f"### blockscale {name} {kind}\n", _block(own.format_help())]
    parts.append(_EXIT_CODES)
    return "\n".join(parts)


def _below(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Name -> parser of what a command is divided into."""
    found = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return found[0] if found else {}


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"


_EXIT_CODES = """## Exit codes

| code | meaning |
|---|---|
| 0 | done |
| 1 | a check that was asked for failed (`lint`, `--max-kl`, `--max-perplexity-ratio`) |
| 2 | usage or bad input; `error:` and `hint:` lines on stderr |

Data goes to stdout, progress and notices to stderr. Every verb that prints data takes `--json`.
"""


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"  # argparse wraps to the terminal
    raise SystemExit(publish(PAGE, render()))
