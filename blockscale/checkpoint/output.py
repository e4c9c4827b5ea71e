"""Writing a model folder that appears whole or not at all, tensor by tensor, and that survives being killed.

Everything is laid out before the first byte is written: names, dtypes and shapes fix every shard's header and every
tensor's place, so tensors may arrive in any order and none is held. Work goes on beside the target:

    .NAME.partial/plan         digest of the job; a resumed run must have the same
                  journal      a line of JSON per finished unit of work, appended after its bytes were written
                  STAGE/       what another stage of the job, such as calibration, needs to go on
                  checkpoint/  the folder itself, renamed to NAME at the end

A killed process leaves `.NAME.partial` behind, from which the same job resumes. The process at work holds a lock on it.
"""

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from blockscale.checkpoint.header import TensorInfo, header_bytes, read_chunks, read_header
from blockscale.checkpoint.shards import INDEX_NAME, SINGLE_NAME
from blockscale.checkpoint.steps import MODULES_NAME, step_folders
from blockscale.checkpoint.target import check_absent, disk_errors
from blockscale.checkpoint.tensors import DTYPE_NAMES, pwrite_all, tensor_bytes, torch_dtype
from blockscale.errors import OutputError
from blockscale.formats.tensor import FLOAT_DTYPES, non_finite_error
from blockscale.pages import size

MAX_SHARD_BYTES = 5_000_000_000
PROGRESS_NAME = "progress.json"

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def partial_path(out: Path) -> Path:
    return out.parent / f".{out.name}.partial"


def save_progress(folder: Path, facts: Mapping[str, Any]) -> None:
    """What a stage needs to go on after a kill, as its file PROGRESS_NAME: the old one or the new one, never half."""
    partial = folder / f"{PROGRESS_NAME}.partial"
    with disk_errors(folder):
        partial.write_text(json.dumps(facts), encoding="utf-8")
        os.replace(partial, folder / PROGRESS_NAME)


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
        self.out = out = Path(os.path.abspath(out))
        self.work = partial_path(out)
        self._checkpoint = self.work / "checkpoint"
        self._journal_path = self.work / "journal"
        self._shards = _split(layout, max_shard_bytes)
        self.tensor_bytes = sum(s.data_bytes for s in self._shards)
        self.num_bytes = self.tensor_bytes + sum(len(s.header) for s in self._shards)
        self._places = {
            name: Place(self._checkpoint / s.name, offset, *layout[name])
            for s in self._shards
            for name, offset in s.offsets.items()
        }
        self.done: dict[str, Any] = {}
        self.was_resumed = False
        self._unwritten = set(self._places)
        self._unjournalled: list[str] = []
        self._bookkeeping = threading.Lock()
        self._journal: BinaryIO
        self._is_finished = False
        with disk_errors(out):
            self._lock = lock_folder(self.work, out)
            is_ours = True
            try:
                check_absent(out)  # another process may have finished it before the lock was free
                if resume and self._is_of_another_job(job):
                    is_ours = False
                    raise OutputError(
                        f"{self.work} is the unfinished work of another job (model, recipe, text, device or version)",
                        hint="run that job again with --resume, or drop --resume to start over",
                    )
                self._start(job, resume)
            except BaseException:
                if is_ours and not self.was_resumed:
                    _remove(self.work)
                os.close(self._lock)
                raise

    def _is_of_another_job(self, job: str) -> bool:
        """Whether there is unfinished work with a plan that is not this job's, nor the beginning of it."""
        plan = self.work / "plan"
        return plan.is_file() and not job.encode().startswith(plan.read_bytes())

    def _start(self, job: str, resume: bool) -> None:
        plan = self.work / "plan"
        if resume and plan.is_file() and plan.read_bytes() == job.encode() and self._has_shards():
            self.was_resumed = True
            self._journal = self._journal_path.open("r+b")
            for unit, record, names in _read_journal(self._journal):
                self.done[unit] = record
                self._unwritten.difference_update(names)
            return
        _clear(self.work)
        self._checkpoint.mkdir()
        self._journal = self._journal_path.open("wb")
        free = shutil.disk_usage(self.work).free
        if free < self.num_bytes:
            raise OutputError(
                f"{self.out}: the disk is full: {size(self.num_bytes)} are needed, {size(free)} are free",
                hint="free some space or write elsewhere",
            )
        for shard in self._shards:
            path = self._checkpoint / shard.name
            path.write_bytes(shard.header)
            os.truncate(path, len(shard.header) + shard.data_bytes)
        plan.write_bytes(job.encode())  # last: whatever is killed before this starts anew

    def _has_shards(self) -> bool:
        """Whether every file is there, with the header and the length that the layout asks for."""
        for shard in self._shards:
            path = self._checkpoint / shard.name
            if not path.is_file() or path.stat().st_size != len(shard.header) + shard.data_bytes:
                return False
            with path.open("rb") as file:
                if file.read(len(shard.header)) != shard.header:
                    return False
        return self._journal_path.is_file()

    def __enter__(self) -> "OutputFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._journal.close()
        is_interruption = kind is not None and not issubclass(kind, Exception)
        if kind is not None and not self._is_finished and not (is_interruption and self.has_progress):
            _remove(self.work)
        os.close(self._lock)

    @property
    def has_progress(self) -> bool:
        """Whether there is anything that a resumed run would not have to do again."""
        return bool(self.done) or any(self.work.glob(f"*/{PROGRESS_NAME}"))

    def state_path(self, name: str) -> Path:
        """A place for another stage's own state, removed with the rest of the work. A folder there has something to
        resume once it holds a file PROGRESS_NAME."""
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
        self._note(name)
        if not tensor.numel():
            return
        with disk_errors(self.out), place.path.open("r+b", buffering=0) as file:
            pwrite_all(file.fileno(), tensor_bytes(tensor), place.offset)

    def copy(self, name: str, source: TensorInfo) -> None:
        """Puts a stored tensor in its place byte for byte, without holding it. NonFiniteError for NaN or Inf."""
        place = self._places[name]
        assert (torch_dtype(source), source.shape) == (place.dtype, place.shape), name
        self._note(name)
        with disk_errors(self.out), place.path.open("r+b", buffering=0) as writer:
            offset = place.offset
            for chunk in read_chunks(source):
                _check_finite(chunk, source, offset - place.offset)
                pwrite_all(writer.fileno(), memoryview(chunk), offset)
                offset += len(chunk)

    def _note(self, name: str) -> None:
        with self._bookkeeping:
            self._unwritten.discard(name)
            self._unjournalled.append(name)

    def mark_done(self, unit: str, record: object = None) -> None:
        """Journals a unit of work whose tensors are all written; `record` (JSON) comes back after a resume."""
        with self._bookkeeping:  # with the names of other units' tensors too: those are written again if need be
            names, self._unjournalled = self._unjournalled, []
        with disk_errors(self.out):
            self._journal.write(json.dumps([unit, record, names]).encode() + b"\n")
            self._journal.flush()
        self.done[unit] = record

    def finish(
        self,
        files: Mapping[str, str],
        companions: Sequence[Path] = (),
        check: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        """Writes index and side files, lets `check` look at the folder as a reader would, and renames it.

        OutputError if a tensor of the layout was never written.
        """
        if self._unwritten:
            raise OutputError(
                f"{self.out}: {len(self._unwritten)} tensors were planned and never written, "
                f"first '{min(self._unwritten)}'",
                hint="this is a fault of blockscale; please report it with the model's config",
            )
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
                for step in step_folders(path.parent) if path.name == MODULES_NAME else ():
                    shutil.copytree(step, self._checkpoint / step.name, dirs_exist_ok=True)
            for name, text in files.items():
                (self._checkpoint / name).write_text(text, encoding="utf-8")
        check(self._checkpoint)
        with disk_errors(self.out):
            os.replace(self._checkpoint, self.out)
        self._is_finished = True
        _remove(self.work)


def layout_bytes(layout: Layout) -> int:
    """Of the files that a layout makes, headers included."""
    return sum(len(shard.header) + shard.data_bytes for shard in _split(layout, MAX_SHARD_BYTES))


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
    for i, (group, data_bytes) in enumerate(zip(groups, sizes, strict=True), 1):
        header, offsets = header_bytes({n: (DTYPE_NAMES[dtype], shape) for n, (dtype, shape) in group.items()})
        name = SINGLE_NAME if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors"
        shards.append(_Shard(name, header, offsets, data_bytes))
    return shards


def _read_journal(file: BinaryIO) -> Iterator[tuple[str, Any, list[str]]]:
    """Finished units. What follows the last whole line (one cut short by a kill) is cut off before more is appended."""
    end = 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        try:
            unit, record, names = json.loads(line)
        except (ValueError, TypeError):
            break
        end += len(line)
        yield unit, record, names
    file.seek(end)
    file.truncate()


def lock_folder(path: Path, out: Path) -> int:
    """Makes the folder and locks it until the descriptor is closed; OutputError if another process holds it."""
    while True:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError as e:
            os.close(descriptor)
            raise OutputError(f"{out} is being written by another process", hint="wait for it") from e
        os.close(descriptor)  # its last owner removed the folder before it let go of the lock


def _clear(work: Path) -> None:
    """Empties the folder, the plan first: without it nothing that is left can be taken for work done."""
    (work / "plan").unlink(missing_ok=True)
    for entry in work.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _remove(work: Path) -> None:
    with suppress(OSError):
        _clear(work)
        work.rmdir()


def _check_finite(chunk: bytes, source: TensorInfo, offset: int) -> None:
    """NonFiniteError that names the tensor and its first bad position; `offset`: of the chunk in the tensor."""
    dtype = torch_dtype(source)
    if dtype not in FLOAT_DTYPES or not source.name.endswith(".weight"):  # a stored mask may well hold -inf
        return
    values = torch.frombuffer(bytearray(chunk), dtype=dtype)
    if not torch.isfinite(values).all():
        raise non_finite_error(values, source.shape, source.name, offset // dtype.itemsize)
