"""Parts of stored tensors are read without the rest."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from blockscale.checkpoint import tensors as tensors_module
from blockscale.checkpoint.header import TensorInfo, read_header
from blockscale.checkpoint.parts import columns_of, rows_of
from blockscale.checkpoint.tensors import read_tensor
from blockscale.errors import CheckpointError, FormatError


@pytest.fixture
def stored(tmp_path: Path) -> tuple[torch.Tensor, TensorInfo]:
    """Neither first nor last in its file."""
    value = torch.arange(7 * 40, dtype=torch.int32).view(7, 40)
    ones = torch.ones(5, dtype=torch.int32)
    save_file({"a": ones, "weight": value, "z": ones.clone()}, tmp_path / "m.safetensors")
    return value, read_header(tmp_path / "m.safetensors")["weight"]


@pytest.mark.parametrize("skipped", [0, 1 << 16], ids=["a row a call", "whole rows"])
@pytest.mark.parametrize("band", [1, 330, 1 << 20])
def test_every_part(
    skipped: int, band: int, stored: tuple[torch.Tensor, TensorInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors_module, "_SKIPPED_BYTES", skipped)
    monkeypatch.setattr(tensors_module, "_BAND_BYTES", band)
    value, info = stored
    for begin, end in ((0, 40), (0, 16), (16, 32), (39, 40), (5, 5)):
        columns = columns_of(info, begin, end)
        assert torch.equal(read_tensor(columns), value[:, begin:end])
        assert columns.num_bytes == 4 * 7 * (end - begin)
        for first, last in ((0, 7), (2, 5), (6, 7), (3, 3)):
            assert torch.equal(read_tensor(rows_of(info, first, last)), value[first:last])
            assert torch.equal(read_tensor(rows_of(columns, first, last)), value[first:last, begin:end])
    within = columns_of(columns_of(info, 8, 32), 4, 12)
    assert torch.equal(read_tensor(within), value[:, 12:20])


def test_what_lies_between_is_not_read(
    stored: tuple[torch.Tensor, TensorInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors_module, "_SKIPPED_BYTES", 0)
    read, plain = [], os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        read.append(sum(map(len, buffers)))
        return plain(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    read_tensor(columns_of(stored[1], 8, 16))
    assert read == [32] * 7


def test_parts_that_are_not_there(stored: tuple[torch.Tensor, TensorInfo], tmp_path: Path) -> None:
    _, info = stored
    for begin, end in ((-1, 3), (5, 4), (0, 41)):
        with pytest.raises(FormatError, match="weight: no columns"):
            columns_of(info, begin, end)
    with pytest.raises(FormatError, match="weight: no rows 0 to 8"):
        rows_of(info, 0, 8)
    with pytest.raises(FormatError, match="no columns"):
        columns_of(info._replace(shape=(280,)), 0, 1)
    os.truncate(info.path, info.offset + 100)
    with pytest.raises(CheckpointError, match="it ended while 'weight' was read"):
        read_tensor(columns_of(info, 8, 16))
