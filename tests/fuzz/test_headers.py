"""Headers made up by hypothesis, and headers that claim more than there is."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blockscale.checkpoint.header import read_header
from blockscale.errors import CheckpointError

from .targets import outcome

MANY = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SIZES = st.one_of(st.integers(-3, 40), st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30]))
SCALARS = st.one_of(st.none(), st.booleans(), SIZES, st.floats(), st.text(max_size=5))
DTYPES = st.one_of(st.sampled_from(["U8", "F8_E4M3", "BF16", "F32", "I64", "BOOL", "F4"]), SCALARS)
ENTRIES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.fixed_dictionaries(
        {},
        optional={
            "dtype": DTYPES,
            "shape": st.one_of(st.lists(st.one_of(SIZES, SCALARS), max_size=4), SCALARS),
            "data_offsets": st.one_of(st.lists(st.one_of(SIZES, SCALARS), max_size=3), SCALARS),
            "more": SCALARS,
        },
    ),
)
HEADERS = st.one_of(SCALARS, st.lists(ENTRIES, max_size=3), st.dictionaries(st.text(max_size=6), ENTRIES, max_size=4))


def write(path: Path, text: bytes, data: bytes = b"", length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


@MANY
@given(HEADERS, st.binary(max_size=64))
def test_any_json(tmp_path: Path, header: Any, data: bytes) -> None:
    file = write(tmp_path / "x.safetensors", json.dumps(header).encode(), data)
    if outcome(read_header, file) is None:
        infos = read_header(file)
        assert sum(info.num_bytes for info in infos.values()) == len(data)
        assert all(0 <= info.offset <= file.stat().st_size for info in infos.values())


@MANY
@given(st.binary(max_size=200))
def test_any_bytes(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    outcome(read_header, tmp_path / "x.safetensors")


@MANY
@given(st.binary(max_size=100), st.integers(0, 2**64 - 1))
def test_any_length(tmp_path: Path, text: bytes, length: int) -> None:
    outcome(read_header, write(tmp_path / "x.safetensors", text, b"", length))


@pytest.mark.parametrize("length", [100_000_001, 10 << 30, 2**63 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("file_bytes", [100, 12 << 30])
def test_a_header_of_10_gb_is_not_read(length: int, file_bytes: int, tmp_path: Path) -> None:
    """Even where the file, which is a hole, is that long."""
    file = write(tmp_path / "x.safetensors", b"{}", b"", length)
    with file.open("r+b") as opened:
        opened.truncate(file_bytes)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_header(file)


def test_a_name_twice(tmp_path: Path) -> None:
    """The second counts, as for the reference; then nothing claims the first's bytes."""
    one = '"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}'
    two = '"a": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}'
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_header(write(tmp_path / "x.safetensors", f"{{{one}, {two}}}".encode(), b"1234"))
