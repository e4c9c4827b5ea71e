"""A checkpoint made from another: what is copied and what is made anew, streamed into a folder of its own.

    stored tensors --job by job (a fused group, a linear, a tensor)--> copied, or read and made again --> their places

The config files are written from the tensors; every other entry of the config stays. The folder appears whole or not
at all, and only after it was read back and found to be what was planned.
"""

import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockscale.checkpoint.dialects.stored import StoredLinear
from blockscale.checkpoint.header import TensorInfo
from blockscale.checkpoint.linear import Scheme
from blockscale.checkpoint.output import MAX_SHARD_BYTES, Layout, OutputFolder
from blockscale.checkpoint.read_back import read_back_problem
from blockscale.checkpoint.reader import DIALECTS
from blockscale.checkpoint.record import RECORD_NAME
from blockscale.checkpoint.shards import read_json
from blockscale.checkpoint.source import SourceTensor
from blockscale.checkpoint.structure import kept_reason, module_name, unquantized_modules, with_untied_head
from blockscale.checkpoint.tensors import torch_dtype
from blockscale.checkpoint.units import COPY_BYTES, Unit, run_units
from blockscale.errors import CheckpointError, OutputError
from blockscale.formats.tensor import check_finite

Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True)
class Made:
    """Tensors by their new names. `errors`: module -> relative error (root of summed squares over the source's) of
    those whose values are not the source's."""

    tensors: Mapping[str, Tensor]
    errors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """Tensors that come to be together.

    stored     what it reads; the new checkpoint keeps the source's order, by the first of these
    copies     new name -> stored tensor, copied byte for byte
    layout     what `make` gives: new name -> dtype and shape
    make       reads and computes; nothing of it is held before and after
    linears    quantized linears that the tensors make up: module -> scheme, and shape [N, K] or [E, N, K]
    attention  the module whose KV cache the tensors are scales of
    held_bytes at most, while `make` runs

    Tensors of a job with neither linears nor attention are kept ones, in 16 bits.
    """

    name: str
    stored: tuple[TensorInfo, ...]
    copies: Mapping[str, TensorInfo] = field(default_factory=dict)
    layout: Layout = field(default_factory=dict)
    make: Callable[[], Made] | None = None
    linears: Mapping[str, tuple[Scheme, tuple[int, ...]]] = field(default_factory=dict)
    attention: str | None = None
    held_bytes: int = COPY_BYTES

    @property
    def tensors(self) -> Layout:
        """Everything that it writes."""
        return {**{name: (torch_dtype(info), info.shape) for name, info in self.copies.items()}, **self.layout}

    @property
    def num_bytes(self) -> int:
        """Of the source's tensors."""
        return sum(info.num_bytes for info in self.stored)


@dataclass(frozen=True)
class Written:
    """`errors`: of every job, see `Made`."""

    out: Path
    num_bytes: int
    errors: Mapping[str, float]


def keep_tensor(tensor: SourceTensor) -> Job:
    """A tensor that is no quantized linear's: byte for byte, or as the 16 bits that it stands for."""
    if tensor.is_plain:
        return Job(tensor.name, tensor.stored, copies={tensor.name: tensor.stored[0]})
    held = tensor.num_bytes + 2 * sum(info.num_bytes for info in tensor.stored)
    layout = {tensor.name: (tensor.dtype, tensor.shape)}

    def make() -> Made:
        value = tensor.read()
        if value.numel():
            check_finite(value, torch.stack(torch.aminmax(value)), tensor.name)
        return Made({tensor.name: value})

    return Job(tensor.name, tensor.stored, layout=layout, make=make, held_bytes=held)


def copy_linear(linear: StoredLinear) -> Job:
    """A quantized linear as it is, into the same dialect."""
    stored = tuple(linear.tensors.values())
    return Job(
        linear.name,
        stored,
        copies={info.name: info for info in stored},
        linears={linear.name: (linear.scheme, linear.shape)},
    )


def copy_kv_scales(attention: str, scales: tuple[TensorInfo, TensorInfo]) -> Job:
    """Key and value scale as they are, into the same dialect."""
    return Job(attention, scales, copies={info.name: info for info in scales}, attention=attention)


def write_checkpoint(
    out: Path,
    jobs: Sequence[Job],
    *,
    dialect: str | None,
    config: Mapping[str, Any],
    kv_format: str | None = None,
    has_pre_quant_scale: bool = False,
    low_rank: Container[str] = (),
    companions: Sequence[Path] = (),
    provenance: Mapping[str, Any],
    progress: Progress | None = None,
    stage: str = "converting",
    check: Callable[[Path], None] = lambda folder: None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Written:
    """Runs the jobs into the new folder `out`.

    dialect      of the result; None for a 16-bit model
    config       of the source, with its quantization_config, which is replaced
    kv_format    "fp8" or "nvfp4", as the config files shall announce it
    low_rank     linears that keep a low-rank branch
    provenance   what blockscale.json shall say, beside the versions
    check        looks at the finished folder, beside what is checked in any case, before it appears under its name

    OutputError for an existing target or a full disk; CheckpointError for what the dialect cannot hold, two tensors of
    one name, and stored tensors that are damaged.
    """
    jobs = sorted(jobs, key=lambda job: min((str(info.path), info.offset) for info in job.stored))
    layout = _joined_layout(jobs)
    linears = {module: planned for job in jobs for module, planned in job.linears.items()}
    kept = {n: what for job in jobs if not job.linears and job.attention is None for n, what in job.tensors.items()}
    files = _config_files(config, linears, kept, dialect, kv_format, has_pre_quant_scale, low_rank)
    errors: dict[str, float] = {}
    with OutputFolder(
        out, layout, "made from another checkpoint", resume=False, max_shard_bytes=max_shard_bytes
    ) as output:
        units = [Unit(job.name, job.num_bytes, job.held_bytes, _runner(job, output)) for job in jobs]
        total, done = sum(unit.num_bytes for unit in units), 0
        for unit, found in run_units(units):
            errors |= {module: error for module, error in found.items() if error}
            done += unit.num_bytes
            if progress:
                progress(stage, done, total)
        files[RECORD_NAME] = _record(provenance, errors)

        def check_all(path: Path) -> None:
            _check_result(path, linears, kept)
            check(path)

        output.finish(files, companions, check=check_all)
    return Written(output.out, output.num_bytes, errors)


def _joined_layout(jobs: Sequence[Job]) -> Layout:
    layout: dict[str, Any] = {}
    for job in jobs:
        for name, what in job.tensors.items():
            if name in layout:
                raise CheckpointError(
                    f"'{name}' would be written twice, the second time for {job.name}",
                    hint="the checkpoint holds both a quantized and a plain weight of that name: remove one",
                )
            layout[name] = what
    return layout


def _runner(job: Job, output: OutputFolder) -> Callable[[], Mapping[str, float]]:
    def run() -> Mapping[str, float]:
        for name, info in job.copies.items():
            output.copy(name, info)
        if job.make is None:
            return {}
        made = job.make()
        for name, tensor in made.tensors.items():
            output.write(name, tensor)
        return made.errors

    return run


def _config_files(
    config: Mapping[str, Any],
    linears: Mapping[str, tuple[Scheme, tuple[int, ...]]],
    kept: Layout,
    dialect: str | None,
    kv_format: str | None,
    has_pre_quant_scale: bool,
    low_rank: Container[str],
) -> dict[str, str]:
    """Every config file, from the tensors alone."""
    if dialect is None:
        assert not linears
        plain = {key: value for key, value in config.items() if key != "quantization_config"}
        return {"config.json": json.dumps(plain, indent=2) + "\n"}
    config = with_untied_head(config, linears)
    shapes = {name: shape for name, (_, shape) in kept.items()}
    reasons = {module_name(name): kept_reason(name, shape, config) for name, shape in shapes.items()}
    schemes = {module: scheme for module, (scheme, _) in linears.items()}
    modules = unquantized_modules(schemes, shapes, reasons)
    return DIALECTS[dialect].config_files(config, schemes, modules, kv_format, has_pre_quant_scale, low_rank)


def _record(provenance: Mapping[str, Any], errors: Mapping[str, float]) -> str:
    versions = {"blockscale": version("blockscale"), "torch": torch.__version__}
    return json.dumps({**versions, **provenance, "errors": dict(errors)}, indent=1) + "\n"


def source_record(folder: Path) -> Mapping[str, Any] | None:
    """What the source's own blockscale.json says, to be told along; None if another program wrote it."""
    file = folder / RECORD_NAME
    return read_json(file) if file.is_file() else None


def _check_result(path: Path, linears: Mapping[str, tuple[Scheme, tuple[int, ...]]], kept: Layout) -> None:
    problem = read_back_problem(path, linears, kept)
    if problem:
        raise OutputError(problem, hint="this is a fault of blockscale; please report it with the model's config")
