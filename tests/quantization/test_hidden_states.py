"""Hidden states on disk: what is read back, what a kill or a full disk leaves, what is removed."""

import errno
import os
from pathlib import Path

import pytest
import torch

from blockscale.errors import OutputError
from blockscale.quantization import hidden_states
from blockscale.quantization.hidden_states import HiddenStates, write_tensors


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_batches_come_back_as_they_were(dtype: torch.dtype, tmp_path: Path) -> None:
    states = HiddenStates(tmp_path, "hidden")
    batches = [drawn(8, 5, 16, dtype=dtype), drawn(3, 5, 16, dtype=dtype).transpose(0, 1), drawn(0, 5, 16, dtype=dtype)]
    for i, batch in enumerate(batches):
        states.write(0, i, batch)
    for i, batch in enumerate(batches):
        found = states.read(0, i)
        assert found.dtype == dtype
        assert torch.equal(found, batch)
        found.add_(1)  # a tensor of its own
        assert torch.equal(states.read(0, i), batch)


def test_streams_and_generations_are_apart(tmp_path: Path) -> None:
    full, quantized = HiddenStates(tmp_path, "full"), HiddenStates(tmp_path, "quantized")
    for generation in range(3):
        full.write(generation, 0, drawn(1, 2, generation + 1))
    quantized.write(1, 0, drawn(4, 4, 4))
    full.keep_only(1)
    assert full.read(1, 0).shape == (1, 2, 2)
    assert [full.is_whole(generation, 1) for generation in range(3)] == [False, True, False]
    full.clear()
    assert not full.is_whole(1, 1)
    assert quantized.read(1, 0).shape == (4, 4, 4)
    full.clear()  # nothing is there


def test_a_generation_without_its_last_batch_is_not_whole(tmp_path: Path) -> None:
    states = HiddenStates(tmp_path, "hidden")
    states.write(4, 0, drawn(2, 3, 4))
    states.write(4, 1, drawn(1, 3, 4))
    assert states.is_whole(4, 2)
    assert not states.is_whole(4, 3)


@pytest.mark.parametrize("length", [0, 7, 40, 199])
def test_a_file_that_was_cut_is_not_read(length: int, tmp_path: Path) -> None:
    states = HiddenStates(tmp_path, "hidden")
    states.write(0, 0, drawn(2, 3, 4))
    file = tmp_path / "hidden" / "0" / "0"
    assert length < file.stat().st_size
    os.truncate(file, length)
    assert not states.is_whole(0, 1)
    with pytest.raises(OutputError, match="cannot be read back") as error:
        states.read(0, 0)
    assert "without --resume" in error.value.hint


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_write_that_is_cut_short_leaves_what_was_there(
    calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Header, bytes and name come one after the other; before the last of them the file is the old one."""
    states = HiddenStates(tmp_path, "hidden")
    old = drawn(2, 3, 4)
    states.write(0, 0, old)
    left = calls

    class Killed(BaseException):
        pass

    def or_killed(function):
        def call(*args):
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return function(*args)

        return call

    monkeypatch.setattr(hidden_states.os, "pwrite", or_killed(os.pwrite))
    monkeypatch.setattr(hidden_states.os, "replace", or_killed(os.replace))
    with pytest.raises(Killed):
        states.write(0, 0, old + 1)
    monkeypatch.undo()
    assert torch.equal(states.read(0, 0), old)
    states.write(0, 0, old + 2)
    assert torch.equal(states.read(0, 0), old + 2)


@pytest.mark.parametrize(("code", "match"), [(errno.ENOSPC, "the disk is full"), (errno.EIO, "cannot be written")])
def test_a_disk_that_fails(code: int, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(hidden_states.os, "pwrite", fail)
    with pytest.raises(OutputError, match=match) as error:
        HiddenStates(tmp_path, "hidden").write(0, 0, drawn(2, 3, 4))
    assert error.value.hint


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "hidden").write_text("a file")
    with pytest.raises(OutputError, match="cannot be written"):
        HiddenStates(tmp_path, "hidden").write(0, 0, drawn(2, 3, 4))


def test_several_tensors_in_one_file(tmp_path: Path) -> None:
    tensors = [torch.tensor([[True, False]]), torch.arange(12), drawn(3, 1, 2, dtype=torch.bfloat16), torch.tensor(2.5)]
    write_tensors(tmp_path / "file", [*tensors, *tensors, *tensors])  # more than ten: "10" is not after "1"
    found = [hidden_states.read_back(info) for info in hidden_states.stored_tensors(tmp_path / "file")]
    assert len(found) == 12
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, tensors * 3, strict=True))


def test_what_layers_leave_for_later_ones_follows_the_windows(tmp_path: Path) -> None:
    states = HiddenStates(tmp_path, "hidden")
    keys, values = drawn(3, 2, 5, 4), drawn(3, 2, 5, 1)
    states.shared((4, 5, 6), "cpu")["a/b .."] = (keys, values)
    found = states.shared((4, 6), "cpu")["a/b .."]
    assert torch.equal(found[0], keys[[0, 2]])
    assert torch.equal(found[1], values[[0, 2]])
    assert "a/b .." in states.shared((6,), "cpu")
    assert "other" not in states.shared((6,), "cpu")
    with pytest.raises(KeyError):
        states.shared((6, 7), "cpu")["a/b .."]
    states.write(0, 0, keys)
    states.keep_only(1)
    assert "a/b .." in states.shared((4, 5, 6), "cpu"), "these are of no generation"
    assert {p.name for p in tmp_path.rglob("*") if p.is_file()} == {"4", "5", "6"}
    assert {p.parent.parent.parent for p in tmp_path.rglob("*") if p.is_file()} == {tmp_path / "hidden"}
