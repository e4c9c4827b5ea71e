"""Building the CPU's kernels where things go wrong. Needs a C compiler that works, and builds with plain C alone."""

import multiprocessing
import os
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from blockscale.errors import MissingDependencyError
from blockscale.formats.spec import NVFP4
from blockscale.formats.tensor import encode
from blockscale.kernels import cache
from blockscale.kernels.cpu import build, library
from blockscale.kernels.cpu.linear import linear, linear_int8, linear_w4a4, prepare
from blockscale.kernels.cpu.quantize import quantize_nvfp4
from blockscale.kernels.prepare import Layout, row_major
from blockscale.kernels.reference import linear as reference


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, and plain C only: the rest takes seconds."""
    monkeypatch.setenv("BLOCKSCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "X86_UNITS", ())
    monkeypatch.setattr(build, "FLAGS", ("-O1", *build.FLAGS[1:]))
    forget()
    yield tmp_path / "cache" / "kernels"
    forget()


def forget() -> None:
    for remembered in (library.library, build._version, cache._say_once, cache._temporary_folder):
        remembered.cache_clear()


def compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def never(*_: object) -> str:
    raise AssertionError("compiled although it is there")


def test_a_library_is_built_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.build_library()
    assert [p.name for p in folder.iterdir()] == [first.name]
    monkeypatch.setattr(build, "_compile", never)
    assert build.build_library() == first
    assert library.best_level() is library.Level.PORTABLE
    assert not library.can_run(library.Level.AVX2)


def test_another_compiler_or_other_flags_are_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_build", lambda _c, _u, _f, target: target.write_bytes(b"x"))
    first = build.build_library()
    working = shlex.join(build.find_compiler())
    monkeypatch.setenv("CC", compiler(tmp_path / "mycc", f'exec {working} "$@"'))
    second = build.build_library()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert len({first, second, build.build_library()}) == 3


@pytest.mark.parametrize(
    "script",
    ["echo 'portable.c:1: error: no memory' >&2; exit 1", "exit 3", "kill -9 $$"],
    ids=["says why", "says nothing", "dies"],
)
def test_a_compiler_that_fails(script: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path / "badcc", script))
    with pytest.raises(MissingDependencyError, match=r"badcc.*fails") as raised:
        build.build_library()
    assert "CC" in raised.value.hint
    assert not list(folder.iterdir())
    assert_torch_serves("fails")


@pytest.mark.parametrize("named", ["/nowhere/cc -O2", ""])
def test_no_compiler(named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", named)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="no C compiler"):
        build.build_library()
    assert_torch_serves("no C compiler")


def assert_torch_serves(reason: str) -> None:
    """One notice, and the results of the reference."""
    weight, x = row_major(encode(torch.randn(24, 64), NVFP4)), torch.randn(3, 64)
    with pytest.warns(RuntimeWarning, match=reason):
        prepared = prepare(weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert prepared.layout is Layout.ROW_MAJOR
        assert torch.equal(linear(x, prepared), reference.linear_w4a16(x, weight))
        assert torch.equal(linear_int8(x, prepared), reference.linear_w4a16(x, weight))
        assert torch.equal(linear_w4a4(x, prepared), reference.linear_w4a4(x, weight))
        assert torch.equal(quantize_nvfp4(x)[0], encode(x, NVFP4).packed)
    assert library.best_level() is None


def test_a_prepared_weight_outlives_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = row_major(encode(torch.randn(24, 64), NVFP4)), torch.randn(3, 64)
    prepared = prepare(weight)
    assert prepared.layout is Layout.CPU
    library.library.cache_clear()
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.warns(RuntimeWarning, match="no C compiler"):
        y = linear(x, prepared)
    assert torch.equal(y, reference.linear_w4a16(x, weight))
    assert torch.equal(linear_w4a4(x, prepared), reference.linear_w4a4(x, weight))


def test_a_compiler_that_lacks_an_instruction_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does not know is left out, and the rest serves."""
    working = shlex.join(build.find_compiler())
    old = f'case "$*" in *-mnew*) echo "error: unrecognized option -mnew" >&2; exit 1;; esac; exec {working} "$@"'
    monkeypatch.setenv("CC", compiler(tmp_path / "oldcc", old))
    monkeypatch.setattr(build, "_units", lambda _: (build.Unit("avx2.c", ("-mnew",), "HAVE_AVX2"), *build.PLAIN_UNITS))
    assert library.best_level() is library.Level.PORTABLE


def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    folder.parent.write_text("a file where the folder should be")
    with pytest.warns(RuntimeWarning, match="not kept"):
        path = build.build_library()
    assert path.is_file()
    assert library.best_level() is library.Level.PORTABLE
    assert build.build_library() == path


def test_a_damaged_library_is_built_again() -> None:
    path = build.build_library()
    path.write_bytes(b"\x7fELF" + b"\0" * 100)
    assert library.best_level() is library.Level.PORTABLE


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_two_processes_at_once(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()

    def child() -> None:
        barrier.wait()
        results.put(str(build.build_library()))

    children = [context.Process(target=child) for _ in range(2)]
    for process in children:
        process.start()
    paths = {results.get(timeout=60) for _ in children}
    for process in children:
        process.join()
    assert len(paths) == 1
    assert [str(p) for p in folder.iterdir()] == [*paths]
    assert library.best_level() is library.Level.PORTABLE
