"""Damaged GGUF files: an error that says something, and nothing left in the cache."""

import os
import random
import shutil
import struct
from pathlib import Path

import pytest
from checkpoint.tiny_gguf import LAYERS, llama_tensors, write_gguf

from blockscale.checkpoint.gguf_import import import_gguf
from blockscale.checkpoint.locate import locate

from .mutate import damage_bytes
from .targets import outcome

SEEDS = range(4)
ROUNDS = 8
HEADER_BYTES = 2000  # damage here meets counts, lengths, keys and types


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLOCKSCALE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, llama_tensors())
    return path.read_bytes()


def ask(data: bytes, folder: Path, cache: Path) -> str | None:
    file = folder / "x.gguf"
    file.write_bytes(data)
    message = outcome(import_gguf, file)
    made = [path.name for path in cache.iterdir()] if cache.exists() else []
    assert not made or message is None, made
    shutil.rmtree(cache, ignore_errors=True)
    return message


def test_the_whole_file_is_read(whole: bytes, tmp_path: Path, cache: Path) -> None:
    assert ask(whole, tmp_path, cache) is None


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_headers(seed: int, whole: bytes, tmp_path: Path, cache: Path) -> None:
    draw = random.Random(seed)
    for _ in range(ROUNDS):
        ask(damage_bytes(whole[:HEADER_BYTES], draw) + whole[HEADER_BYTES:], tmp_path, cache)


@pytest.mark.parametrize("length", [0, 1, 4, 8, 23, 24, 100, 1000, 5000])
def test_files_cut_short(length: int, whole: bytes, tmp_path: Path, cache: Path) -> None:
    assert ask(whole[:length], tmp_path, cache)


def test_files_cut_within_the_data(whole: bytes, tmp_path: Path, cache: Path) -> None:
    assert ask(whole[:-1000], tmp_path, cache)


@pytest.mark.parametrize("field", ["tensors", "keys"])
@pytest.mark.parametrize("count", [0, 2**31, 2**63 - 1, 2**64 - 1])
def test_counts_that_cannot_be(count: int, field: str, whole: bytes, tmp_path: Path, cache: Path) -> None:
    begin = {"tensors": 8, "keys": 16}[field]
    assert ask(whole[:begin] + struct.pack("<Q", count) + whole[begin + 8 :], tmp_path, cache)


@pytest.mark.parametrize("count", [3, 8194, 2**31 - 1, 2**32 - 1])
def test_more_layers_than_it_holds(count: int, whole: bytes, tmp_path: Path, cache: Path) -> None:
    """Nothing of their size is built."""
    key = b"llama.block_count"
    begin = whole.index(key) + len(key) + 4  # behind the value's type
    assert struct.unpack_from("<I", whole, begin) == (LAYERS,)
    message = ask(whole[:begin] + struct.pack("<I", count) + whole[begin + 4 :], tmp_path, cache)
    assert f"counts {count} layers and holds {LAYERS}" in (message or "")


@pytest.mark.parametrize("data", [b"", b"GGUF", b"GGUF" + b"\xff" * 100, b"\0" * 1000, b"<!DOCTYPE html>" * 50])
def test_no_gguf(data: bytes, tmp_path: Path, cache: Path) -> None:
    assert ask(data, tmp_path, cache)


def test_a_pipe_named_gguf(tmp_path: Path, cache: Path) -> None:
    os.mkfifo(tmp_path / "x.gguf")
    assert outcome(locate, tmp_path / "x.gguf")
