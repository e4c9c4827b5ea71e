"""Writing a model folder that appears whole or not at all, tensor by tensor, and that survives being killed.

Everything is laid out before the first byte is written: names, dtypes and shapes fix every shard's header and every
tensor's place, so tensors may arrive in any order and none is held. Work goes on beside the target:

    .NAME.partial/plan         digest of the job; a resumed run must have the same
                  journal      a line of JSON per finished unit of work, appended after its bytes were written
                  checkpoint/  the folder itself, renamed to NAME at the end

A killed process leaves `.NAME.partial` behind, from which the same job resumes.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockscale.checkpoint.folder import INDEX_NAME, SINGLE_NAME
from blockscale.checkpoint.header import TensorInfo, header_bytes, read_header
from blockscale.errors import OutputError

MAX_SHARD_BYTES = 5_000_000_000
_COPY_BYTES = 16 << 20

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def partial_path(out: Path) -> Path:
    return out.parent / f".{out.name}.partial"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns an OSError of writing into one OutputError."""
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutputError(f"{path}: the disk is full", hint="free some space or write elsewhere") from e
        raise OutputError(f"{path}: cannot be written: {e.strerror}", hint="check the path and its rights") from e


def check_absent(out: Path) -> None:
    """OutputError unless `out` is absent (or an empty folder) and its parent can take it."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise OutputError(f"{out} exists already", hint="choose another name or remove it first")


@dataclass(frozen=True)
class Place:
    """Where a tensor of the output lies, and what it must be."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class OutputFolder:
    """One output in the making. Use as a context manager: an error removes the work, an interruption keeps what a
    later `resume` can use."""

    def __init__(self, out: Path, layout: Layout, job: str, *, resume: bool, max_shard_bytes: int = MAX_SHARD_BYTES):
        """`layout`: every tensor in storage order. `job`: digest of what determines the bytes."""
        check_absent(out)
        self.out = out
        self.work = partial_path(out)
        self._checkpoint = self.work / "checkpoint"
        self._journal_path = self.work / "journal"
        self._shards = _split(layout, max_shard_bytes)
        self.num_bytes = sum(len(s.header) + s.data_bytes for s in self._shards)
        self._places = {
            name: Place(self._checkpoint / s.name, offset, *layout[name])
            for s in self._shards
            for name, offset in s.offsets.items()
        }
        self.done: dict[str, Any] = {}
        with disk_errors(out):
            self._start(job, resume)

    def _start(self, job: str, resume: bool) -> None:
        plan = self.work / "plan"
        if self.work.exists() and not (resume and plan.is_file() and plan.read_text() == job):
            shutil.rmtree(self.work)
        self.was_resumed = self.work.exists()
        self._checkpoint.mkdir(parents=True, exist_ok=True)
        self._journal = self._journal_path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise OutputError(f"{self.out} is being written by another process", hint="wait for it") from e
        if self.was_resumed:
            self._journal.seek(0)
            self.done = dict(_read_journal(self._journal.read()))
            return
        free = shutil.disk_usage(self.work).free
        if free < self.num_bytes:
            raise OutputError(
                f"{self.out}: the disk is full: {self.num_bytes / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free",
                hint="free some space or write elsewhere",
            )
        for shard in self._shards:
            path = self._checkpoint / shard.name
            path.write_bytes(shard.header)
            os.truncate(path, len(shard.header) + shard.data_bytes)
        plan.write_text(job)

    def __enter__(self) -> "OutputFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._journal.close()
        if kind is None:
            return
        is_interruption = not issubclass(kind, Exception)
        if not (is_interruption and self.has_progress):
            shutil.rmtree(self.work, ignore_errors=True)

    @property
    def has_progress(self) -> bool:
        """Whether there is anything that a resumed run would not have to do again."""
        return bool(self.done) or self.state_path("calibration.safetensors").is_file()

    def state_path(self, name: str) -> Path:
        """A place for another stage's own resumable state, removed with the rest of the work."""
        return self.work / name

    def write(self, name: str, tensor: Tensor) -> None:
        """Puts a tensor in its place. OutputError if it is not what the layout says."""
        place = self._places[name]
        if tensor.dtype != place.dtype or tuple(tensor.shape) != place.shape:
            raise OutputError(
                f"'{name}' was planned as {place.dtype} {list(place.shape)} and came as "
                f"{tensor.dtype} {list(tensor.shape)}",
                hint="this is a fault of blockscale; please report it with the model's config",
            )
        if not tensor.numel():
            return
        data = memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        with disk_errors(self.out), place.path.open("r+b", buffering=0) as file:
            _pwrite_all(file.fileno(), data, place.offset)

    def copy(self, name: str, source: TensorInfo) -> None:
        """Puts a stored tensor in its place byte for byte, without holding it."""
        place = self._places[name]
        assert (source.dtype, source.shape) == (place.dtype, place.shape), name
        with source.path.open("rb", buffering=0) as reader, place.path.open("r+b", buffering=0) as writer:
            done = 0
            while done < source.num_bytes:
                chunk = os.pread(reader.fileno(), min(_COPY_BYTES, source.num_bytes - done), source.offset + done)
                if not chunk:
                    raise OutputError(
                        f"{source.path} shrank while '{name}' was copied", hint="do not change the source"
                    )
                with disk_errors(self.out):
                    _pwrite_all(writer.fileno(), memoryview(chunk), place.offset + done)
                done += len(chunk)

    def mark_done(self, unit: str, record: object = None) -> None:
        """Journals a unit of work whose tensors are all written; `record` (JSON) comes back after a resume."""
        with disk_errors(self.out):
            self._journal.write(json.dumps([unit, record]) + "\n")
            self._journal.flush()
        self.done[unit] = record

    def finish(
        self,
        files: Mapping[str, str],
        companions: Sequence[Path] = (),
        check: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        """Writes index and side files, lets `check` look at the folder as a reader would, and renames it."""
        weight_map, total = {}, 0
        for shard in self._shards:
            written = read_header(self._checkpoint / shard.name)
            assert list(written) == list(shard.offsets), shard.name
            weight_map.update(dict.fromkeys(written, shard.name))
            total += sum(info.num_bytes for info in written.values())
        with disk_errors(self.out):
            if len(self._shards) > 1:
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                (self._checkpoint / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
            for path in companions:
                shutil.copyfile(path, self._checkpoint / path.name)
            for name, text in files.items():
                (self._checkpoint / name).write_text(text, encoding="utf-8")
        check(self._checkpoint)
        with disk_errors(self.out):
            os.replace(self._checkpoint, self.out)
            shutil.rmtree(self.work, ignore_errors=True)


@dataclass(frozen=True)
class _Shard:
    name: str
    header: bytes
    offsets: Mapping[str, int]
    data_bytes: int


def _split(layout: Layout, max_shard_bytes: int) -> list[_Shard]:
    """Shards in order, each as full as it gets without passing the limit (a larger tensor has one of its own)."""
    groups: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    sizes = [0]
    for name, (dtype, shape) in layout.items():
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        if groups[-1] and sizes[-1] + num_bytes > max_shard_bytes:
            groups.append({})
            sizes.append(0)
        groups[-1][name] = (dtype, shape)
        sizes[-1] += num_bytes
    count = len(groups)
    shards = []
    for i, (group, size) in enumerate(zip(groups, sizes, strict=True), 1):
        header, offsets = header_bytes(group)
        name = SINGLE_NAME if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors"
        shards.append(_Shard(name, header, offsets, size))
    return shards


def _read_journal(text: str) -> Iterator[tuple[str, Any]]:
    """Finished units; a last line cut short by a kill is not one."""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            unit, record = json.loads(line)
            yield unit, record


def _pwrite_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data[: 1 << 30], offset)
        data, offset = data[written:], offset + written
