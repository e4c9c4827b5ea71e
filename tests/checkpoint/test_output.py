"""A folder that appears whole or not at all."""

import errno
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockscale.checkpoint import output
from blockscale.checkpoint.folder import open_folder
from blockscale.checkpoint.header import read_header
from blockscale.checkpoint.output import PROGRESS_NAME, OutputFolder, partial_path
from blockscale.checkpoint.tensors import torch_dtype
from blockscale.errors import CheckpointError, OutputError

from .child import folder_bytes, kill_self, killed_at_line, run_child
from .files import same

SMALL_SHARDS = 150  # bytes: the tensors below fill several


class Job:
    """A small model: seven units of two tensors, one written and one copied, and a tensor that belongs to no unit."""

    def __init__(self, source: Path) -> None:
        generator = torch.Generator().manual_seed(0)
        self.written = {f"w{i}": torch.randn(i + 1, 9, generator=generator).bfloat16() for i in range(7)}
        self.written["empty"] = torch.empty(0, 4)
        self.written["last"] = torch.tensor(3.5)
        copied = {f"c{i}": torch.randint(0, 256, (5, i + 1), generator=generator, dtype=torch.uint8) for i in range(7)}
        source.mkdir(exist_ok=True)
        save_file(copied, source / "model.safetensors")
        (source / "tokenizer.json").write_text("{}")
        self.source = source
        self.infos = read_header(source / "model.safetensors")
        self.tensors: dict[str, Tensor] = {**copied, **self.written}
        self.layout = {name: (t.dtype, tuple(t.shape)) for name, t in self.tensors.items()}
        self.units_run: list[int] = []

    def open(self, out: Path, *, resume: bool = False, job: str = "job") -> OutputFolder:
        return OutputFolder(out, self.layout, job, resume=resume, max_shard_bytes=SMALL_SHARDS)

    def run(self, out: Path, *, resume: bool = False, until: int = 7, error: BaseException | None = None) -> None:
        """Works from the first unit that is not done; raises `error` before unit `until`."""
        self.units_run = []
        with self.open(out, resume=resume) as result:
            for i in range(7):
                if f"unit{i}" in result.done:
                    assert result.done[f"unit{i}"] == {"sqnr": i / 2}
                    continue
                if i == until and error:
                    raise error
                self.units_run.append(i)
                result.write(f"w{i}", self.written[f"w{i}"])
                result.copy(f"c{i}", self.infos[f"c{i}"])
                result.mark_done(f"unit{i}", {"sqnr": i / 2})
            for name in ("empty", "last"):
                result.write(name, self.written[name])
            result.finish({"config.json": "{}"}, [self.source / "tokenizer.json"], check=open_folder)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "source")


@pytest.fixture
def whole(job: Job, tmp_path: Path) -> dict[str, bytes]:
    """What an uninterrupted run writes."""
    job.run(tmp_path / "whole")
    return folder_bytes(tmp_path / "whole")


def check_gone(out: Path) -> None:
    assert not out.exists()
    assert not partial_path(out).exists()


# ---------------------------------------------------------------- a whole folder


def test_what_was_written_is_what_is_read(job: Job, tmp_path: Path) -> None:
    out = tmp_path / "new" / "parents" / "out"
    job.run(out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    found = {name: t for file in out.glob("*.safetensors") for name, t in load_file(file).items()}
    assert found.keys() == job.tensors.keys()
    assert all(same(found[name], tensor) for name, tensor in job.tensors.items())
    assert (out / "tokenizer.json").read_text() == "{}"


def test_the_index_is_made_from_the_files(job: Job, whole: dict[str, bytes]) -> None:
    index = json.loads(whole["model.safetensors.index.json"])
    shards = sorted(name for name in whole if name.endswith(".safetensors"))
    count = len(shards)
    assert count > 3
    assert shards == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    headers = {name: json.loads(whole[name][8 : 8 + struct.unpack("<Q", whole[name][:8])[0]]) for name in shards}
    held = {tensor: name for name, header in headers.items() for tensor in header if tensor != "__metadata__"}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in job.tensors.values())


def test_one_shard_has_no_index(job: Job, tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "out", {"a": (torch.int8, (2,))}, "job", resume=False) as result:
        assert result.num_bytes == len((result.work / "checkpoint" / "model.safetensors").read_bytes())
        result.write("a", torch.tensor([1, 2], dtype=torch.int8))
        result.finish({})
    assert folder_bytes(tmp_path / "out").keys() == {"model.safetensors"}


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_shards_are_full_but_not_fuller(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int) -> None:
    """In order, none beyond the limit unless by a single tensor, and none that the next tensor would have fitted in."""
    layout = {f"t{i}": (torch.uint8, (size,)) for i, size in enumerate(sizes)}
    parent = tmp_path_factory.mktemp("shards")
    with OutputFolder(parent / "out", layout, "job", resume=False, max_shard_bytes=limit) as result:
        for name, (dtype, shape) in layout.items():
            result.write(name, torch.zeros(shape, dtype=dtype))
        result.finish({"config.json": "{}"})
    shards = [read_header(path) for path in sorted((parent / "out").glob("*.safetensors"))]
    assert [name for shard in shards for name in shard] == list(layout)
    totals = [sum(info.num_bytes for info in shard.values()) for shard in shards]
    assert all(total <= limit or len(shard) == 1 for total, shard in zip(totals, shards, strict=True))
    firsts = [next(iter(shard.values())).num_bytes for shard in shards[1:]]
    assert all(total + first > limit for total, first in zip(totals, firsts, strict=False))


def test_views_and_strides_are_written_as_they_look(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).view(3, 4)
    views = {"t": matrix.t(), "row": matrix[1], "expanded": torch.tensor([1.0]).expand(5), "grad": matrix.clone()}
    views["grad"].requires_grad_()
    layout = {name: (t.dtype, tuple(t.shape)) for name, t in views.items()}
    with OutputFolder(tmp_path / "out", layout, "job", resume=False) as result:
        for name, tensor in views.items():
            result.write(name, tensor)
        result.finish({})
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in views.items())


def test_an_empty_folder_is_taken(job: Job, whole: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    job.run(tmp_path / "out")
    assert folder_bytes(tmp_path / "out") == whole


def test_the_current_folder_is_taken(
    job: Job, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    job.run(Path("."))
    assert folder_bytes(tmp_path / "here") == whole
    assert not (tmp_path / ".here.partial").exists()


# ---------------------------------------------------------------- what is there is left alone


def taken_places(parent: Path) -> dict[str, Path]:
    (parent / "full").mkdir()
    (parent / "full" / "a").write_text("keep")
    (parent / "empty").mkdir()
    (parent / "to_empty").symlink_to(parent / "empty")
    (parent / "to_nothing").symlink_to(parent / "nothing")
    os.mkfifo(parent / "pipe")
    places = {path.name: path for path in parent.iterdir() if path.name not in ("empty", "source")}
    return {**places, "file": parent / "full" / "a"}


def test_a_place_that_is_taken(job: Job, tmp_path: Path) -> None:
    places = taken_places(tmp_path)
    assert len(places) == 5
    for path in places.values():
        with pytest.raises(OutputError, match="exists already") as caught:
            job.open(path)
        assert caught.value.hint
        assert not partial_path(path).exists()
    assert (tmp_path / "full" / "a").read_text() == "keep"


def test_a_place_that_is_taken_while_the_work_goes_on(job: Job, tmp_path: Path) -> None:
    def look(folder: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "a").write_text("keep")

    with (
        pytest.raises(OutputError, match="cannot be written"),
        OutputFolder(tmp_path / "out", {}, "job", resume=False) as result,
    ):
        result.finish({}, check=look)
    assert folder_bytes(tmp_path / "out") == {"a": b"keep"}
    assert not partial_path(tmp_path / "out").exists()


def test_a_parent_that_is_a_file(job: Job, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("keep")
    with pytest.raises(OutputError, match="cannot be written"):
        job.open(tmp_path / "file" / "out")
    assert (tmp_path / "file").read_text() == "keep"


def test_a_parent_without_rights(job: Job, tmp_path: Path) -> None:
    parent = tmp_path / "locked"
    parent.mkdir(mode=0o555)

    def attempt() -> None:
        if os.geteuid() == 0:
            os.seteuid(65534)  # rights do not bind root
        with pytest.raises(OutputError, match=r"out.*Permission denied"):
            job.open(parent / "out")

    os.chmod(tmp_path, 0o755)
    os.chmod(tmp_path.parent, 0o755)
    assert run_child(attempt) == 0
    assert list(parent.iterdir()) == []


# ---------------------------------------------------------------- errors leave nothing


@pytest.mark.parametrize("until", [0, 1, 4, 6])
def test_an_error_on_the_way(until: int, job: Job, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        job.run(tmp_path / "out", until=until, error=ZeroDivisionError())
    check_gone(tmp_path / "out")


def test_an_error_of_the_last_look(job: Job, tmp_path: Path) -> None:
    def look(folder: Path) -> None:
        assert folder.parent == partial_path(tmp_path / "out")
        assert (folder / "config.json").is_file()
        raise CheckpointError("not what was planned")

    with pytest.raises(CheckpointError), OutputFolder(tmp_path / "out", {}, "job", resume=False) as result:
        result.finish({"config.json": "{}"}, check=look)
    check_gone(tmp_path / "out")


def test_an_error_after_the_folder_is_there_leaves_it_and_the_next_ones_work(job: Job, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with OutputFolder(out, {}, "job", resume=False) as first:
        first.finish({"config.json": "{}"})
    shutil.rmtree(out)
    other = job.open(out)  # works at the same place now
    first._lock = os.open(tmp_path, os.O_RDONLY)  # the real one is closed already
    first.__exit__(ZeroDivisionError, None, None)
    assert (other.work / "plan").is_file()
    other.__exit__(ZeroDivisionError, None, None)
    check_gone(out)


def test_a_tensor_that_is_not_what_was_planned(job: Job, tmp_path: Path) -> None:
    for wrong in (torch.zeros(1, 9), torch.zeros(9, dtype=torch.bfloat16), torch.zeros(9, 1, dtype=torch.bfloat16)):
        match = r"'w0' was planned as torch.bfloat16 \[1, 9\] and came as"
        with pytest.raises(OutputError, match=match), job.open(tmp_path / "out") as result:
            result.write("w0", wrong)
        check_gone(tmp_path / "out")


@pytest.mark.parametrize("forgotten", ["w3", "c6", "last", "empty"])
def test_a_tensor_that_never_came(forgotten: str, job: Job, tmp_path: Path) -> None:
    """Its place would hold zeros."""

    def run() -> None:
        with job.open(tmp_path / "out") as result:
            for name, tensor in job.tensors.items():
                if name != forgotten:
                    result.write(name, tensor)
            result.finish({})

    with pytest.raises(OutputError, match=f"1 tensors were planned and never written, first '{forgotten}'"):
        run()
    check_gone(tmp_path / "out")


def test_a_source_that_shrinks(job: Job, tmp_path: Path) -> None:
    source = tmp_path / "source" / "model.safetensors"
    source.write_bytes(source.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=r"source/model\.safetensors is truncated"):
        job.run(tmp_path / "out")
    check_gone(tmp_path / "out")


def fail_after(function: Callable[..., Any], calls: int, code: int) -> Callable[..., Any]:
    left = calls

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(code, os.strerror(code))
        return function(*args, **kwargs)

    return failing


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize(
    ("place", "calls"),
    [("pwrite", 0), ("pwrite", 5), ("pwrite", 14), ("truncate", 0), ("truncate", 2), ("replace", 0)],
)
def test_a_disk_that_fails(
    place: str, calls: int, code: int, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output.os, place, fail_after(getattr(os, place), calls, code))
    match = "the disk is full" if code != errno.EIO else "cannot be written: Input/output error"
    with pytest.raises(OutputError, match=match) as caught:
        job.run(tmp_path / "out")
    assert caught.value.hint
    monkeypatch.undo()
    check_gone(tmp_path / "out")


def test_a_disk_without_room_is_named_in_sizes_that_say_something(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: SimpleNamespace(free=7))
    with pytest.raises(OutputError, match=r"the disk is full: [1-9][\d.]* k?B are needed, 7 B are free"):
        job.run(tmp_path / "out")


def test_a_disk_that_fills_with_companions(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.shutil, "copyfile", fail_after(shutil.copyfile, 0, errno.ENOSPC))
    with pytest.raises(OutputError, match="the disk is full"):
        job.run(tmp_path / "out")
    check_gone(tmp_path / "out")


def test_a_disk_without_room_is_refused_at_the_start(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with job.open(tmp_path / "room") as result:
        needed = result.num_bytes
    for free, is_enough in ((needed - 1, False), (needed, True)):
        usage = shutil.disk_usage(tmp_path)._replace(free=free)
        monkeypatch.setattr(output.shutil, "disk_usage", lambda _, usage=usage: usage)
        if is_enough:
            job.run(tmp_path / "out")
        else:
            with pytest.raises(OutputError, match="the disk is full"):
                job.run(tmp_path / "out")
            check_gone(tmp_path / "out")


def test_short_writes_are_taken_up(
    job: Job, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(output.os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
    job.run(tmp_path / "out")
    assert folder_bytes(tmp_path / "out") == whole


# ---------------------------------------------------------------- interruptions can be taken up


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interruption_keeps_progress(
    interruption: type[BaseException], job: Job, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(interruption):
        job.run(out, until=3, error=interruption())
    assert not out.exists()
    assert partial_path(out).is_dir()
    job.run(out, resume=True)
    assert job.units_run == [3, 4, 5, 6]
    assert folder_bytes(out) == whole
    assert not partial_path(out).exists()


def test_an_interruption_without_progress_keeps_nothing(job: Job, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        job.run(tmp_path / "out", until=0, error=KeyboardInterrupt())
    check_gone(tmp_path / "out")


def test_an_interruption_keeps_another_stages_state(job: Job, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = job.open(out)
    state = result.state_path("calibration")
    state.mkdir()
    (state / PROGRESS_NAME).write_bytes(b"statistics")
    result.__exit__(KeyboardInterrupt, None, None)
    with job.open(out, resume=True) as result:
        assert result.was_resumed
        assert (state / PROGRESS_NAME).read_bytes() == b"statistics"
    with job.open(out, resume=False):
        assert not state.exists()


def test_an_interruption_keeps_nothing_of_a_stage_that_only_began(job: Job, tmp_path: Path) -> None:
    result = job.open(tmp_path / "out")
    result.state_path("calibration").mkdir()
    (result.state_path("calibration") / "hidden").write_bytes(b"states")
    result.__exit__(KeyboardInterrupt, None, None)
    check_gone(tmp_path / "out")


def interrupted(job: Job, out: Path, until: int = 3) -> Path:
    with pytest.raises(KeyboardInterrupt):
        job.run(out, until=until, error=KeyboardInterrupt())
    return partial_path(out)


def test_without_resume_the_work_starts_anew(job: Job, whole: dict[str, bytes], tmp_path: Path) -> None:
    interrupted(job, tmp_path / "out")
    job.run(tmp_path / "out")
    assert job.units_run == list(range(7))
    assert folder_bytes(tmp_path / "out") == whole


def test_the_work_of_another_job_is_not_taken_up(job: Job, tmp_path: Path) -> None:
    work = interrupted(job, tmp_path / "out")
    before = folder_bytes(work)
    with pytest.raises(OutputError, match="unfinished work of another job") as error:
        job.open(tmp_path / "out", resume=True, job="other")
    assert "--resume" in error.value.hint
    assert folder_bytes(work) == before
    with job.open(tmp_path / "out", job="other") as result:  # without `resume` it starts over
        assert result.done == {}


def remove_shards(work: Path) -> None:
    shutil.rmtree(work / "checkpoint")


def cut_a_shard(work: Path) -> None:
    shard = max((work / "checkpoint").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])


def change_a_header(work: Path) -> None:
    shard = max((work / "checkpoint").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes().replace(b'"dtype"', b'"DTYPE"', 1))


def remove_the_journal(work: Path) -> None:
    (work / "journal").unlink()


def cut_the_plan(work: Path) -> None:
    (work / "plan").write_bytes(b"jo")


@pytest.mark.parametrize("damage", [remove_shards, cut_a_shard, change_a_header, remove_the_journal, cut_the_plan])
def test_work_that_is_not_whole_is_not_taken_up(
    damage: Callable[[Path], None], job: Job, whole: dict[str, bytes], tmp_path: Path
) -> None:
    damage(interrupted(job, tmp_path / "out"))
    job.run(tmp_path / "out", resume=True)
    assert job.units_run == list(range(7))
    assert folder_bytes(tmp_path / "out") == whole


def test_a_journal_torn_anywhere_in_its_last_line(job: Job, whole: dict[str, bytes], tmp_path: Path) -> None:
    """Whatever is left of the line, the units before it count, and a second kill and resume find a sound journal."""
    interrupted(job, tmp_path / "out")
    journal = (partial_path(tmp_path / "out") / "journal").read_bytes()
    start = journal.rstrip(b"\n").rindex(b"\n") + 1
    for end in range(start, len(journal)):
        out = tmp_path / f"out{end}"
        shutil.copytree(partial_path(tmp_path / "out"), partial_path(out))
        (partial_path(out) / "journal").write_bytes(journal[:end])
        with pytest.raises(KeyboardInterrupt):
            job.run(out, resume=True, until=5, error=KeyboardInterrupt())
        assert job.units_run == [2, 3, 4]
        job.run(out, resume=True)
        assert job.units_run == [5, 6]
        assert folder_bytes(out) == whole


@pytest.mark.parametrize("line", [b"garbage\n", b"\x00\x00\x00\n", b"[]\n", b'["unit9"]\n', b"7\n", b"\n"])
def test_a_journal_is_trusted_up_to_its_first_bad_line(
    line: bytes, job: Job, whole: dict[str, bytes], tmp_path: Path
) -> None:
    journal = interrupted(job, tmp_path / "out") / "journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0] + line + lines[2])
    job.run(tmp_path / "out", resume=True)
    assert job.units_run == [1, 2, 3, 4, 5, 6]
    assert folder_bytes(tmp_path / "out") == whole


def test_killed_at_any_line(job: Job, whole: dict[str, bytes], tmp_path: Path) -> None:
    """Killed anywhere, killed again as it resumes, and resumed: the same bytes, or the folder was there already."""
    choose = random.Random(0)
    reached_end = False
    for i, number in enumerate([*range(1, 60, 2), *sorted(choose.sample(range(60, 760), 40)), 100_000]):
        out = tmp_path / f"out{i}"

        def work(resume: bool, at: int, out: Path = out) -> Callable[[], None]:
            def run() -> None:
                killed_at_line(output.__file__, at)()
                job.run(out, resume=resume)

            return run

        code = run_child(work(resume=False, at=number))
        if out.exists():  # killed, if at all, after the folder was whole
            assert folder_bytes(out) == whole
            reached_end = reached_end or code == 0
            continue
        assert code == -9
        assert run_child(work(resume=True, at=choose.randrange(1, 400))) in (0, -9)
        if not out.exists():
            job.run(out, resume=True)
        assert folder_bytes(out) == whole
        assert not partial_path(out).exists() or number > 300
    assert reached_end


def test_killed_as_the_folder_was_renamed(
    job: Job, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of the work does not get in the way of the next run at this place."""
    out = tmp_path / "out"

    def work() -> None:
        output._remove = lambda work: kill_self()
        job.run(out)

    assert run_child(work) == -9
    assert folder_bytes(out) == whole
    assert partial_path(out).is_dir()
    shutil.rmtree(out)
    job.run(out, resume=True)
    assert folder_bytes(out) == whole
    assert not partial_path(out).exists()


# ---------------------------------------------------------------- one process at a time


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["job", "other"])
def test_a_second_process_is_refused_and_harms_nothing(
    resume: bool, name: str, job: Job, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def second() -> None:
        with pytest.raises(OutputError, match="is being written by another process"):
            job.open(out, resume=resume, job=name)

    with job.open(out) as result:
        for i, (key, tensor) in enumerate(job.tensors.items()):
            result.write(key, tensor)
            result.mark_done(key)
            if i % 5 == 0:
                assert run_child(second) == 0
        result.finish({"config.json": "{}"}, [job.source / "tokenizer.json"])
    assert folder_bytes(out) == whole
    assert not partial_path(out).exists()


def test_a_lock_ends_with_its_process(job: Job, whole: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"

    def first() -> None:
        job.open(out).mark_done("unit0")
        kill_self()

    assert run_child(first) == -9
    job.run(out)
    assert folder_bytes(out) == whole


def test_a_folder_that_was_finished_while_one_waited_for_the_lock(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, lock = tmp_path / "out", output.lock_folder

    def slow_lock(path: Path, target: Path) -> int:
        monkeypatch.setattr(output, "lock_folder", lock)
        job.run(out)
        return lock(path, target)

    monkeypatch.setattr(output, "lock_folder", slow_lock)
    with pytest.raises(OutputError, match="exists already"):
        job.open(out)
    assert (out / "config.json").is_file()
    assert not partial_path(out).exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_kept_tensor_that_is_not_finite_is_named(value: float, tmp_path: Path) -> None:
    from blockscale.checkpoint.folder import open_folder
    from blockscale.errors import NonFiniteError

    source, tensor = tmp_path / "m", torch.ones(3, 5, dtype=torch.bfloat16)
    tensor[2, 1] = value
    source.mkdir()
    (source / "config.json").write_text("{}")
    save_file({"model.norm.weight": tensor}, source / "model.safetensors")
    info = open_folder(source).tensors["model.norm.weight"]
    layout = {info.name: (torch_dtype(info), info.shape)}
    with (
        pytest.raises(NonFiniteError, match=r"model\.norm\.weight: (nan|inf) at \[2, 1\]"),
        output.OutputFolder(tmp_path / "out", layout, "job", resume=False) as result,
    ):
        result.copy(info.name, info)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
