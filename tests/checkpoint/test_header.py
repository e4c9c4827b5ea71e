"""One safetensors file, against the reference library in both directions."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockscale.checkpoint.header import TensorInfo, header_bytes, read_chunks, read_header
from blockscale.checkpoint.tensors import DTYPE_NAMES, TORCH_DTYPES, read_tensor
from blockscale.errors import CheckpointError

from .files import as_bytes, entry, raw_file, same

SHAPES = [(), (1,), (7,), (3, 5), (2, 0, 3), (0,), (2, 1, 4, 3)]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Any bytes (0 and 1 for bool), so NaNs and infinities too."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def write_ours(path: Path, tensors: dict[str, Tensor]) -> Path:
    header, offsets = header_bytes({name: (DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()})
    data = bytearray(header)
    for name, tensor in tensors.items():
        assert offsets[name] == len(data)
        data += as_bytes(tensor)
    path.write_bytes(data)
    return path


def read_ours(path: Path) -> dict[str, Tensor]:
    return {name: read_tensor(info) for name, info in read_header(path).items()}


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=TORCH_DTYPES)
def test_reads_what_the_reference_library_writes(dtype: torch.dtype, tmp_path: Path) -> None:
    written = {f"t{i}": random_tensor(dtype, shape, i) for i, shape in enumerate(SHAPES)}
    save_file(written, tmp_path / "x.safetensors", {"format": "pt"})
    ours = read_ours(tmp_path / "x.safetensors")
    assert ours.keys() == written.keys()
    assert all(same(ours[name], tensor) for name, tensor in written.items())


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=TORCH_DTYPES)
def test_the_reference_library_reads_what_is_written(dtype: torch.dtype, tmp_path: Path) -> None:
    written = {f"t{i}": random_tensor(dtype, shape, i) for i, shape in enumerate(SHAPES)}
    path = write_ours(tmp_path / "x.safetensors", written)
    theirs = {}
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers refuses a file without it
        for name in file.keys():  # noqa: SIM118
            theirs[name] = file.get_tensor(name)
    assert theirs.keys() == written.keys()
    assert all(same(theirs[name], tensor) for name, tensor in written.items())


def test_an_empty_file_of_tensors(tmp_path: Path) -> None:
    save_file({}, tmp_path / "theirs.safetensors")
    assert read_header(tmp_path / "theirs.safetensors") == {}
    assert load_file(write_ours(tmp_path / "ours.safetensors", {})) == {}


def test_data_begin_on_a_multiple_of_eight() -> None:
    for length in range(1, 20):
        header, offsets = header_bytes({"x" * length: ("F32", (1,))})
        assert offsets == {"x" * length: len(header)}
        assert len(header) % 8 == 0


def test_names_of_any_script(tmp_path: Path) -> None:
    tensors = {'módulo."0"\n\\': torch.ones(2), "层.权重": torch.zeros(1), "": torch.ones(1)}
    assert load_file(write_ours(tmp_path / "x.safetensors", tensors)).keys() == tensors.keys()
    save_file(tensors, tmp_path / "y.safetensors")
    assert read_ours(tmp_path / "y.safetensors").keys() == tensors.keys()


def test_an_unaligned_header_is_read(tmp_path: Path) -> None:
    for padding in range(8):
        text = json.dumps({"a": entry([3], 0, 12, "F32")}).encode() + b" " * padding
        path = raw_file(tmp_path / "x.safetensors", text, struct.pack("<3f", 1, 2, 3))
        assert read_ours(path)["a"].tolist() == [1, 2, 3]


def test_tensors_come_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    header = {"b": entry([2], 2, 4), "empty": entry([0], 2, 2), "a": entry([2], 0, 2), "__metadata__": {"k": "v"}}
    path = raw_file(tmp_path / "x.safetensors", header, bytes([1, 2, 3, 4]))
    assert list(read_header(path)) == ["a", "empty", "b"]
    assert read_ours(path)["b"].tolist() == [3, 4]


def test_chunks_are_the_tensors_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockscale.checkpoint.header._CHUNK_BYTES", 7)
    tensor = random_tensor(torch.bfloat16, (5, 9))
    path = write_ours(tmp_path / "x.safetensors", {"first": random_tensor(torch.int8, (3,)), "x": tensor})
    chunks = list(read_chunks(read_header(path)["x"]))
    assert max(map(len, chunks)) == 7
    assert b"".join(chunks) == as_bytes(tensor)


def test_long_reads_take_several_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockscale.checkpoint.tensors._MOVED_BYTES", 5)
    tensor = random_tensor(torch.float32, (3, 4))
    assert same(read_ours(write_ours(tmp_path / "x.safetensors", {"x": tensor}))["x"], tensor)


# ---------------------------------------------------------------- files that lie

GOOD = {"a": entry([2], 0, 2), "b": entry([3], 2, 5)}
LIES: dict[str, tuple[object, bytes]] = {
    "no json": (b"not json", b""),
    "no utf-8": (b'{"\xff\xfe": 1}', b""),
    "utf-16": (json.dumps(GOOD).encode("utf-16"), b"12345"),
    "a byte order mark": (b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), b"12345"),
    "json cut short": (json.dumps(GOOD).encode()[:-1], b"12345"),
    "json and more": (json.dumps(GOOD).encode() + b"}", b"12345"),
    "a list": ([1, 2], b""),
    "a number": (5, b""),
    "nested too deep": (b"[" * 100_000, b""),
    "an endless integer": (b'{"a": ' + b"9" * 5000 + b"}", b""),
    "empty header": (b"", b""),
    "entry is null": ({"a": None}, b""),
    "entry is a list": ({"a": [1]}, b""),
    "entry is text": ({"a": "dtype"}, b""),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 2]}}, b"12"),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 2]}}, b"12"),
    "no offsets": ({"a": {"dtype": "U8", "shape": [2]}}, b"12"),
    "one offset": ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [2]}}, b"12"),
    "three offsets": ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2, 4]}}, b"12"),
    "shape is a number": ({"a": {"dtype": "U8", "shape": 2, "data_offsets": [0, 2]}}, b"12"),
    "shape is a fraction": ({"a": entry([2.0], 0, 2)}, b"12"),
    "shape is text": ({"a": entry(["2"], 0, 2)}, b"12"),
    "shape is true": ({"a": entry([True], 0, 1)}, b"1"),
    "shape is infinite": (b'{"a":{"dtype":"U8","shape":[Infinity],"data_offsets":[0,2]}}', b"12"),
    "negative shape": ({"a": entry([-2, -1], 0, 2)}, b"12"),
    "negative begin": ({"a": entry([2], -2, 0)}, b"12"),
    "begin is a fraction": ({"a": entry([2], 0.0, 2)}, b"12"),
    "end before begin": ({"a": entry([2], 2, 0)}, b"12"),
    "shape overflows": ({"a": entry([2**33, 2**33], 0, 2)}, b"12"),
    "empty shape overflows": ({"a": entry([2**33, 2**33, 0], 0, 0)}, b""),
    "shape past 63 bits": ({"a": entry([2**70], 0, 2**70)}, b""),
    "bytes too few": ({"a": entry([3], 0, 2)}, b"12"),
    "bytes too many": ({"a": entry([1], 0, 2)}, b"12"),
    "bytes of another dtype": ({"a": entry([2], 0, 2, "F16")}, b"12"),
    "overlap": ({"a": entry([2], 0, 2), "b": entry([2], 1, 3)}, b"123"),
    "the same bytes twice": ({"a": entry([2], 0, 2), "b": entry([2], 0, 2)}, b"12"),
    "one within another": ({"a": entry([4], 0, 4), "b": entry([2], 1, 3)}, b"1234"),
    "a hole": ({"a": entry([2], 0, 2), "b": entry([2], 3, 5)}, b"12345"),
    "a hole in front": ({"a": entry([2], 1, 3)}, b"123"),
    "an empty tensor past the end": ({"a": entry([2], 0, 2), "b": entry([0], 9, 9)}, b"12"),
    "an empty tensor inside": ({"a": entry([2], 0, 2), "b": entry([0], 1, 1)}, b"12"),
    "bytes after the last tensor": (GOOD, b"123456"),
    "bytes and no tensor": ({}, b"1"),
    "unknown dtype": ({"a": entry([2], 0, 2, "Q4")}, b"12"),
    "dtype is a number": ({"a": entry([2], 0, 2, 8)}, b"12"),
}


def refused_by_the_reference(path: Path) -> bool:
    try:
        with safe_open(path, "pt"):
            return False
    except SafetensorError:
        return True


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused_as_by_the_reference(lie: str, tmp_path: Path) -> None:
    path = raw_file(tmp_path / "x.safetensors", *LIES[lie])
    assert refused_by_the_reference(path)
    with pytest.raises(CheckpointError, match=r"x\.safetensors") as caught:
        read_header(path)
    assert caught.value.hint


def test_the_good_header_of_the_lies_is_read(tmp_path: Path) -> None:
    assert read_ours(raw_file(tmp_path / "x.safetensors", GOOD, b"12345"))["b"].tolist() == list(b"345")


@pytest.mark.parametrize("dtype", ["F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "C64"])
def test_dtypes_that_are_not_read_are_named(dtype: str, tmp_path: Path) -> None:
    path = raw_file(tmp_path / "x.safetensors", {"a.weight": entry([8], 0, 8, dtype)}, b"12345678")
    with pytest.raises(CheckpointError, match=f"'a.weight' has unknown dtype {dtype}"):
        read_header(path)


def test_truncated_anywhere(tmp_path: Path) -> None:
    whole = write_ours(tmp_path / "whole.safetensors", {"a": torch.arange(9.0), "b": torch.ones(2, 2)}).read_bytes()
    path = tmp_path / "x.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"x\.safetensors"):
            read_header(path)
    path.write_bytes(whole)
    assert read_header(path).keys() == {"a", "b"}


@pytest.mark.parametrize("length", [2**31, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_huge_header_length_allocates_nothing(length: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_header(path)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("absent", "folder"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_header(tmp_path / f"{name}.safetensors")


def read_all_chunks(info: TensorInfo) -> list[bytes]:
    return list(read_chunks(info))


@pytest.mark.parametrize("read", [read_tensor, read_all_chunks])
def test_a_file_that_shrinks_or_goes_after_its_header_was_read(read: Any, tmp_path: Path) -> None:
    path = write_ours(tmp_path / "x.safetensors", {"a": torch.ones(100), "b": torch.ones(100)})
    info = read_header(path)["b"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="truncated: it ended while 'b' was read"):
        read(info)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(info)


# ---------------------------------------------------------------- properties


@st.composite
def named_tensors(draw: st.DrawFn) -> dict[str, Tensor]:
    shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
    keys = draw(st.lists(st.text(max_size=8).filter(lambda n: n != "__metadata__"), max_size=5, unique=True))
    return {
        key: random_tensor(draw(st.sampled_from(list(TORCH_DTYPES.values()))), draw(shapes), draw(st.integers(0, 999)))
        for key in keys
    }


@given(named_tensors())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tensors_go_both_ways(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    ours = write_ours(tmp_path / "ours.safetensors", tensors)
    save_file(tensors, tmp_path / "theirs.safetensors")
    for read in (load_file(ours), read_ours(tmp_path / "theirs.safetensors"), read_ours(ours)):
        assert read.keys() == tensors.keys()
        assert all(same(read[name], tensor) for name, tensor in tensors.items())


SAMPLE = json.dumps({"a": entry([2, 1], 0, 8, "F32"), "b.c": entry([3], 8, 11, "I8"), "d": entry([], 11, 13, "BF16")})


@given(st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.sampled_from(b'0123459-.,:"[]{} Uax')), max_size=3))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_header_is_never_read_otherwise_than_by_the_reference(
    tmp_path: Path, damage: list[tuple[int, int]]
) -> None:
    text = bytearray(SAMPLE.encode())
    for position, byte in damage:
        text[position] = byte
    path = raw_file(tmp_path / "x.safetensors", bytes(text), bytes(range(13)))
    try:
        ours = read_ours(path)
    except CheckpointError:
        return
    theirs = load_file(path)
    assert ours.keys() == theirs.keys()
    assert all(same(ours[name], tensor) for name, tensor in theirs.items())
