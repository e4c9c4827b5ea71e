"""The folder of built kernels: whole entries, two processes at once, folders that cannot be written. Needs nothing."""

import multiprocessing
import os
import warnings
from pathlib import Path

import pytest

from blockscale.kernels import cache


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLOCKSCALE_CACHE", str(tmp_path / "cache"))
    cache._say_once.cache_clear()
    cache._temporary_folder.cache_clear()
    return tmp_path / "cache" / "kernels"


def never() -> bytes:
    raise AssertionError("built although it is there")


def test_the_folder_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path) -> None:
    assert cache.kernels_folder() == folder
    monkeypatch.delenv("BLOCKSCALE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.kernels_folder() == tmp_path / "xdg" / "blockscale" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.kernels_folder() == tmp_path / ".cache" / "blockscale" / "kernels"


def test_an_entry_is_built_once_for_its_parts() -> None:
    assert cache.fetch(["source", "flags"], ".bin", lambda: b"first") == b"first"
    assert cache.fetch(["source", "flags"], ".bin", never) == b"first"
    assert cache.fetch(["source", "other flags"], ".bin", lambda: b"second") == b"second"
    assert cache.key("ab", "c") != cache.key("a", "bc") != cache.key("a", b"b", "c")


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_entry_is_built_again(folder: Path, damage: bytes | None) -> None:
    cache.fetch(["s"], ".bin", lambda: b"right")
    (entry,) = folder.iterdir()
    entry.write_bytes(entry.read_bytes()[:-1] if damage is None else damage)
    assert cache.fetch(["s"], ".bin", lambda: b"again") == b"again"
    assert cache.fetch(["s"], ".bin", never) == b"again"


def test_what_fails_to_build_leaves_nothing(folder: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise ValueError("the compiler said no")

    with pytest.raises(ValueError, match="said no"):
        cache.fetch_file(["s"], ".so", fail)
    assert list(folder.iterdir()) == []


@pytest.mark.filterwarnings("error")
def test_a_folder_that_cannot_be_written_costs_one_notice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "a file, where a folder should be"
    file.touch()
    monkeypatch.setenv("BLOCKSCALE_CACHE", str(file))
    with pytest.warns(RuntimeWarning, match="BLOCKSCALE_CACHE"):
        assert cache.fetch(["s"], ".bin", lambda: b"x") == b"x"
    assert cache.fetch(["s"], ".bin", lambda: b"y") == b"y"  # not kept, and not told again
    first = cache.fetch_file(["s"], ".so", lambda path: path.write_bytes(b"lib") and None)
    assert first.read_bytes() == b"lib"
    assert cache.fetch_file(["s"], ".so", lambda path: never() and None) == first


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_likewise(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o500)
    with pytest.warns(RuntimeWarning, match="not kept"):
        assert cache.fetch(["s"], ".bin", lambda: b"x") == b"x"


def build_slowly(barrier: "multiprocessing.synchronize.Barrier", results: "multiprocessing.Queue[bytes]") -> None:
    def build(path: Path) -> None:
        path.write_bytes(b"half")
        barrier.wait(timeout=20)  # both are in the middle of it
        path.write_bytes(b"the whole library")

    results.put(cache.fetch_file(["s"], ".so", build).read_bytes())


def test_two_processes_that_build_at_once_both_get_it(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [context.Process(target=build_slowly, args=(barrier, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert [results.get(timeout=30) for _ in workers] == [b"the whole library"] * 2
    for worker in workers:
        worker.join(timeout=30)
    assert [p.name for p in folder.iterdir()] == [cache.key("s") + ".so"]


def test_a_notice_names_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKSCALE_CACHE", "/proc/nowhere")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache.fetch(["s"], ".bin", lambda: b"x")
    assert "/proc/nowhere/kernels" in str(caught[0].message)
