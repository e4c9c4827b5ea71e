"""`blockscale VERB ...`: finds the verb, and turns every expected failure into `error:` and `hint:` lines."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from blockscale.cli import bench, chat, convert, demo, doctor, evaluate, generate, inspect, lint, plan, quantize, serve
from blockscale.cli.output import printable, reader_may_leave
from blockscale.errors import BlockscaleError

VERBS = {
    module.NAME: module
    for module in (quantize, inspect, lint, convert, evaluate, generate, chat, serve, plan, doctor, bench, demo)
}

_WRITERS = ("convert", "lint", "evaluate", "inspect", "plan")


class Parser(argparse.ArgumentParser):
    """argparse, with this program's way of saying what is wrong."""

    def error(self, message: str) -> NoReturn:
        _fail(message, f"{self.prog} --help")
        raise SystemExit(2)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="blockscale",
        description="Language models in NVFP4: quantize, prove what it cost, write checkpoints for every engine.",
    )
    parser.add_argument("--version", action="version", version=f"blockscale {version('blockscale')}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    for module in VERBS.values():
        own = verbs.add_parser(
            module.NAME,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(own)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 a check that was asked for failed, 2 usage or bad input."""
    args = build_parser().parse_args(argv)
    try:
        with reader_may_leave():
            VERBS[args.verb].run(args)
    except BlockscaleError as error:
        _fail(str(error), error.hint)
        return error.exit_code
    except KeyboardInterrupt:
        _fail("interrupted", _after_interruption(args.verb))
        return 2
    except Exception as error:
        if os.environ.get("BLOCKSCALE_TRACEBACK"):
            raise
        _fail(f"unexpected {type(error).__name__}: {error}", "BLOCKSCALE_TRACEBACK=1 shows where; please report it")
        return 2
    return 0


def _after_interruption(verb: str) -> str:
    if verb in ("quantize", "demo"):
        again = "run again with --resume, it goes on from finished work" if verb == "quantize" else "run it again"
        return f"nothing half-written is left; {again}"
    return "nothing half-written is left" if verb in _WRITERS else ""


def _fail(message: str, hint: str) -> None:
    for label, text in (("error", message), ("hint", hint)):
        if text:
            first, *more = (printable(line.strip()) for line in text.split("\n"))
            print("\n  ".join([f"{label}: {first}", *more]), file=sys.stderr)  # no later line can pass for an error


if __name__ == "__main__":
    raise SystemExit(main())
