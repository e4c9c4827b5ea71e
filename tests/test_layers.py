"""The order of the rooms, and other rules of the house that a parser can check."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "blockscale"
# A room may import from itself and from rooms before it.
ROOMS = (
    "errors",
    "cache_folder",
    "formats",
    "kernels",
    "texts",
    "pages",
    "algorithms",
    "checkpoint",
    "inspection",
    "conversion",
    "planning",
    "host",
    "quantization",
    "evaluation",
    "models",
    "engine",
    "llm",
    "api",
    "server",
    "cli",
    "__main__",
)
# Within the planner, likewise.
PLANNING = ("models", "hardware", "speed", "calibration", "money", "answer", "report", "planner")
MAX_LINES = 400


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(name: str, *, at_import_time: bool = False) -> set[str]:
    """Modules that a module names in its imports, anywhere in it or only where importing it runs them."""

    def walk(node: ast.AST) -> set[str]:
        result: set[str] = set()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                result |= {alias.name for alias in child.names}
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{name}: relative import in line {child.lineno}"
                result |= resolve(child)
            is_later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_type_checking(child)
            if not (at_import_time and is_later):
                result |= walk(child)
        return result

    return walk(tree(name))


def resolve(node: ast.ImportFrom) -> set[str]:
    """`from a.b import c` means a.b.c where that is a module."""
    base = node.module or ""
    names = {f"{base}.{alias.name}" for alias in node.names}
    inside = {n for n in names if n in MODULES}
    return inside | ({base} if len(inside) < len(names) else set())


def room(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "blockscale" and len(parts) > 1 else None


def own_imports(name: str, **options: bool) -> set[str]:
    return {m for m in imports(name, **options) if m in MODULES and m != "blockscale"}


def test_every_module_lies_in_a_known_room() -> None:
    assert {room(name) for name in MODULES} - {None} <= set(ROOMS)


@pytest.mark.parametrize("name", MODULES)
def test_imports_follow_the_order_of_rooms(name: str) -> None:
    own = room(name)
    if own is None:  # the package itself names everything, lazily
        assert own_imports(name, at_import_time=True) == set()
        return
    wrong = {m for m in own_imports(name) if ROOMS.index(room(m) or "cli") > ROOMS.index(own)}
    assert not wrong, f"{own} stands below {sorted(wrong)}"
    assert "blockscale" not in imports(name), "import from the module that holds the name"


@pytest.mark.parametrize("name", [n for n in MODULES if n.startswith("blockscale.planning.")])
def test_the_planner_has_an_order_too(name: str) -> None:
    def place(module: str) -> int:
        return PLANNING.index(module.split(".")[2])

    wrong = {m for m in own_imports(name) if m.startswith("blockscale.planning.") and place(m) > place(name)}
    assert not wrong, f"{name} stands below {sorted(wrong)}"


def test_no_two_files_import_each_other() -> None:
    graph = {name: own_imports(name) for name in MODULES if name != "blockscale"}
    finished: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in finished:
            for other in sorted(graph[name]):
                visit(other, (*path, name))
            finished.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("name", [n for n in MODULES if n == "blockscale" or room(n) in ("cli", "errors")])
def test_the_command_line_imports_nothing_heavy(name: str) -> None:
    """`--help` answers at once: torch and all that imports it wait for the verb."""
    heavy = {"torch", "triton", "transformers", "numpy", "scipy", "safetensors", "gguf", "matplotlib"}
    heavy.add("huggingface_hub")

    def reached(module: str, seen: set[str]) -> set[str]:
        result = {m.split(".")[0] for m in imports(module, at_import_time=True)}
        for other in own_imports(module, at_import_time=True) - seen:
            seen.add(other)
            result |= reached(other, seen)
        return result

    assert not heavy & reached(name, {name})


def test_importing_the_package_does_not_load_torch() -> None:
    code = "import sys, blockscale, blockscale.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", MODULES)
def test_files_stay_small(name: str) -> None:
    assert len(MODULES[name].read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("name", MODULES)
def test_names_of_modules_say_something(name: str) -> None:
    assert not {"utils", "util", "helpers", "misc", "common"} & set(name.split("."))


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is(name: str) -> None:
    assert not tree(name).body or ast.get_docstring(tree(name))


def test_the_checks_themselves() -> None:
    """They see what they are meant to see."""
    assert "blockscale.formats.spec" in own_imports("blockscale.formats.tensor")
    assert "transformers" in imports("blockscale.host.model")
    assert "transformers" not in imports("blockscale.host.model", at_import_time=True)
    assert "torch" in imports("blockscale.formats.tensor", at_import_time=True)
    assert "blockscale.texts" in own_imports("blockscale.api")
    assert len(MODULES) > 40
