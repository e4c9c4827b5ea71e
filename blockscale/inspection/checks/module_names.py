"""Whether an entry of a list names anything in a checkpoint, by whatever way of naming engines know."""

import fnmatch
import re
from collections.abc import Iterable

from blockscale.checkpoint.patterns import compiled, is_pattern


class NamedModules:
    """The modules that have tensors, and those above them."""

    def __init__(self, tensor_names: Iterable[str]) -> None:
        self._names: set[str] = set()
        for name in tensor_names:
            self._names.add(name)  # a bare parameter is named like a module
            parent = name.rpartition(".")[0]
            while parent and parent not in self._names:
                self._names.add(parent)
                parent = parent.rpartition(".")[0]
        self._parts = {part for name in self._names for part in name.split(".")}
        # one a line between dots, so that part of a name is found with one search
        self._lines = "\n".join(f".{name}." for name in self._names)

    def has(self, entry: str) -> bool:
        """Whether it is a module, some whole parts of its name, a glob of either, or `re:` and a pattern of it."""
        if entry in self._names:
            return True
        if is_pattern(entry):
            return any(map(compiled(entry).match, self._names))
        if _is_class(entry):
            return True
        start = entry.removesuffix("*").removesuffix(".")
        if not re.search(r"[*?\[]", start):
            return f".{start}" in self._lines if entry.endswith("*") else f".{start}." in self._lines
        matches = re.compile(fnmatch.translate(entry)).match
        return any(map(matches, self._names)) or any(map(matches, self._parts))


def _is_class(entry: str) -> bool:
    """`Linear`, `Qwen3MoeTopKRouter`: modules by class, which files do not tell."""
    return re.fullmatch(r"[A-Z]\w+", entry) is not None
