"""Histograms of scales, and scalars read where they lie: compared with torch's own decoding. Needs nothing."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from blockscale.checkpoint.header import TensorInfo, read_header
from blockscale.errors import CheckpointError
from blockscale.formats import mx
from blockscale.formats.minifloat import decode_table
from blockscale.formats.spec import E4M3, ScaleType
from blockscale.inspection.census import (
    Census,
    count_bytes,
    is_hole,
    is_scalar,
    joined,
    one_byte_scale,
    pieces,
    read_bytes,
    read_floats,
    read_scalars,
    scale_value,
    share_below,
    take_census,
)

MIB = 1 << 20


def info_of(path: Path, size: int, offset: int = 0, name: str = "scale") -> TensorInfo:
    return TensorInfo(name, "F8_E4M3", (size,), path, offset, size)


def census_of(values: dict[int, int], scale: ScaleType = ScaleType.E4M3) -> Census:
    """Byte -> how often."""
    return Census(scale, tuple(values.get(byte, 0) for byte in range(256)))


def has_holes(path: Path) -> bool:
    """Whether the file system below this path keeps holes, and says where they are."""
    probe = path / "probe"
    with probe.open("wb") as file:
        file.truncate(MIB)
    with probe.open("rb") as file:
        try:
            return os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 0
        except (OSError, AttributeError):
            return False


# ---------------------------------------------------------------- values


def test_e4m3_bytes_have_torchs_values() -> None:
    expected = decode_table(E4M3).tolist()
    np.testing.assert_array_equal([scale_value(ScaleType.E4M3, byte) for byte in range(256)], expected)


def test_e8m0_bytes_have_the_specifications_values() -> None:
    expected = mx.scale_values(torch.arange(256, dtype=torch.uint8)).double().tolist()
    np.testing.assert_array_equal([scale_value(ScaleType.E8M0, byte) for byte in range(256)], expected)


def test_each_e4m3_byte_once() -> None:
    census = census_of(dict.fromkeys(range(256), 1))
    assert census.total == 256
    assert census.num_nan == 2
    assert census.num_negative == 127  # 0x80 (-0) to 0xFE (-448)
    assert census.num_zero == 2
    assert (census.minimum, census.maximum) == (2.0**-9, 448.0)
    assert census.subnormal_share == 14 / 252
    assert all(count == 2 for count in census.magnitudes.values())
    assert list(census.magnitudes) == sorted(census.magnitudes)


def test_each_e8m0_byte_once() -> None:
    census = census_of(dict.fromkeys(range(256), 1), ScaleType.E8M0)
    assert (census.num_nan, census.num_negative, census.num_zero) == (1, 0, 1)
    assert (census.minimum, census.maximum) == (2.0**-126, 2.0**127)
    assert census.subnormal_share == 0


def test_nothing_but_zeros_and_nan() -> None:
    census = census_of({0: 3, 0x7F: 2})
    assert (census.minimum, census.maximum, census.subnormal_share) == (None, None, 0.0)


@given(st.lists(st.integers(0, 255), max_size=40), st.floats(1e-4, 500))
def test_share_below(stored: list[int], limit: float) -> None:
    values = [abs(scale_value(ScaleType.E4M3, byte)) for byte in stored]
    known = [value for value in values if value > 0]  # NaN is not
    expected = sum(value < limit for value in known) / len(known) if known else 0.0
    assert share_below(census_of({byte: stored.count(byte) for byte in stored}), limit) == expected


def test_joined_adds_up() -> None:
    both = joined([census_of({1: 2, 5: 1}), census_of({5: 4})])
    assert both == census_of({1: 2, 5: 5})


# ---------------------------------------------------------------- histograms


@pytest.mark.parametrize("size", [0, 1, 7, 65535, 65536, 65537, 4 * MIB - 1, 4 * MIB, 4 * MIB + 3, 9 * MIB + 1])
@pytest.mark.parametrize("offset", [0, 13])
def test_every_byte_is_counted(tmp_path: Path, size: int, offset: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, offset + size + 5, dtype=np.uint8)
    path = tmp_path / "scales"
    path.write_bytes(data.tobytes())
    wanted = data[offset : offset + size]
    info = info_of(path, size, offset)
    np.testing.assert_array_equal(count_bytes(info), np.bincount(wanted, minlength=256))
    np.testing.assert_array_equal(read_bytes(info), wanted)
    assert take_census(info, ScaleType.E4M3).total == size


def test_holes_count_as_zeros_and_are_not_read(tmp_path: Path) -> None:
    if not has_holes(tmp_path):
        pytest.skip("this file system keeps no holes")
    path, size = tmp_path / "sparse", 1 << 40  # a terabyte takes hours to read
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(1 << 39)
        file.write(b"\x38" * 100_000)
    counts = count_bytes(info_of(path, size))
    assert counts[0x38] == 100_000
    assert counts[0] == size - 100_000
    assert not is_hole(info_of(path, size))
    assert is_hole(info_of(path, 1 << 38))
    assert is_hole(info_of(path, 1 << 38, (1 << 39) + MIB))


def test_pieces_come_in_order(tmp_path: Path) -> None:
    path = tmp_path / "scales"
    path.write_bytes(bytes(range(200)))
    found = [piece.tobytes() for piece, size in pieces(info_of(path, 150, 20), 64) if piece is not None]
    assert b"".join(found) == bytes(range(20, 170))
    assert [len(piece) for piece in found] == [64, 64, 22]


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "scales"
    path.write_bytes(bytes(100))
    with pytest.raises(CheckpointError, match="truncated"):
        read_bytes(info_of(path, 5, 98))
    with pytest.raises(CheckpointError, match="truncated"):
        read_scalars([TensorInfo("scale", "F32", (), path, 98, 4)])


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        count_bytes(info_of(tmp_path / "gone", 5))
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_scalars([TensorInfo("scale", "F32", (), tmp_path / "gone", 0, 4)])


def test_which_dtypes_hold_which_scales(tmp_path: Path) -> None:
    def holds(dtype: str, scale: ScaleType) -> bool:
        return one_byte_scale(TensorInfo("scale", dtype, (4,), tmp_path, 0, 4), scale)

    assert holds("F8_E4M3", ScaleType.E4M3)
    assert not holds("U8", ScaleType.E4M3)
    assert holds("U8", ScaleType.E8M0)
    assert holds("F8_E8M0", ScaleType.E8M0)
    assert not holds("F32", ScaleType.FP32)


# ---------------------------------------------------------------- floats

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
NUMBERS = [0.0, -0.0, 1.0, -2.5, 3.0517578125e-05, 1e-40, 448.0, float("inf"), float("nan")]


def stored(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, TensorInfo]:
    save_file(tensors, path)
    return read_header(path)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_scalars_have_torchs_values(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensors = {f"scale_{i}": torch.tensor(number).to(dtype).reshape(shape) for i, number in enumerate(NUMBERS)}
    found = read_scalars(stored(tmp_path / "model.safetensors", tensors).values())
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor.double().item())
        assert np.signbit(found[name]) == torch.signbit(tensor.double()).item()


def test_each_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    infos = []
    for i in range(3):
        tensors = {f"{i}.{j}": torch.tensor(float(10 * i + j)) for j in range(50)}
        infos += stored(tmp_path / f"{i}.safetensors", tensors).values()
    opened = []
    real_open = Path.open

    def counting(path: Path, *args: object, **options: object) -> object:
        opened.append(path.name)
        return real_open(path, *args, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", counting)
    found = read_scalars(infos[::-1])
    assert sorted(opened) == ["0.safetensors", "1.safetensors", "2.safetensors"]
    assert all(value == 10 * int(name.split(".")[0]) + int(name.split(".")[1]) for name, value in found.items())


def test_what_is_no_scalar(tmp_path: Path) -> None:
    assert is_scalar(TensorInfo("scale", "BF16", (1, 1), tmp_path, 0, 2))
    assert not is_scalar(TensorInfo("scale", "F32", (2,), tmp_path, 0, 8))
    assert not is_scalar(TensorInfo("scale", "U8", (), tmp_path, 0, 1))


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
def test_vectors_have_torchs_values(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor(NUMBERS).to(dtype)
    info = stored(tmp_path / "model.safetensors", {"scale": tensor})["scale"]
    np.testing.assert_array_equal(read_floats(info), tensor.double().numpy())


def test_a_signalling_nan_is_a_nan(tmp_path: Path) -> None:
    tensor = torch.tensor([0x7F81, 0x3F80], dtype=torch.int16).view(torch.bfloat16)
    info = stored(tmp_path / "model.safetensors", {"scale": tensor})["scale"]
    with np.errstate(invalid="raise"):
        np.testing.assert_array_equal(read_floats(info), [np.nan, 1.0])


# ---------------------------------------------------------------- imports


def test_scales_are_looked_at_without_torch() -> None:
    modules = ("census", *(f"checks.{name}" for name in ("scales", "global_scales", "scale_order", "layout")))
    imports = "; ".join(f"import blockscale.inspection.{module}" for module in modules)
    program = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
