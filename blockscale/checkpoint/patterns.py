"""Regular expressions in configs, `re:...` in a list or a group's targets. Anybody may have written them.

Python's matcher tries one way after another, and an expression can have more ways than it could ever try. Those are
refused by their form, before they meet a name: what repeats must be rigid, such as `.` or `\\d`, and all choices of an
expression together must be few.
"""

import math
import re
from collections.abc import Iterable
from functools import cache
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

PREFIX = "re:"
# Powers of two: of the ways that one repetition may have in a name, and of those that one expression may have.
_REPETITION, _MOST = 6.0, 32.0


@cache
def pattern_problem(entry: str) -> str | None:
    """What is wrong with an entry that says it is a regular expression, as the end of a sentence; None for others."""
    if not entry.startswith(PREFIX):
        return None
    try:
        re.compile(entry.removeprefix(PREFIX))
        ways = _ways(parser.parse(entry.removeprefix(PREFIX)))
    except (re.error, OverflowError, RecursionError) as e:
        return f"is no regular expression: {e}"
    return None if ways <= _MOST else "is a regular expression that may take for ever: it repeats what varies"


def is_pattern(entry: str) -> bool:
    """Whether it is a regular expression that can be used."""
    return entry.startswith(PREFIX) and pattern_problem(entry) is None


@cache
def compiled(entry: str) -> re.Pattern[str]:
    """Of an entry without a problem. Engines match it from the start of a name."""
    return re.compile(entry.removeprefix(PREFIX))


def _ways(items: Iterable[tuple[Any, Any]]) -> float:
    """log2 of how many ways a matcher may try at one position; infinite where a repeated part has several itself."""
    total = 0.0
    for code, argument in items:
        if code in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
            least, most, body = argument
            inside = _ways(body)
            total += math.inf if inside and most > 1 else inside + min(math.log2(most - least + 1), _REPETITION)
        elif code is op.BRANCH:
            _, alternatives = argument
            total += math.log2(len(alternatives)) + max(map(_ways, alternatives))
        elif code is op.GROUPREF_EXISTS:
            _, *alternatives = argument
            total += max(_ways(alternative or ()) for alternative in alternatives)
        elif code in (op.SUBPATTERN, op.ASSERT, op.ASSERT_NOT):
            total += _ways(argument[-1])
        elif code is op.ATOMIC_GROUP:
            total += _ways(argument)
    return total
