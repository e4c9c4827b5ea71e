"""Learning a finished checkpoint's codes, block scales and norm gains from its source, end to end.

    windows --> teacher --> distributions ---+
            --> student --> distributions --> KL(teacher || student) --> gradients --> latents, gains --> student

The student computes what evaluation would: rounded weights, rounded activations, rounded caches. What is stored keeps
its layout, its global scales and everything else that is not named here, so engines load it as before.

Source: "Quantization-Aware Distillation" (NVIDIA, 2026) for the loss; FAAR's second stage (arXiv 2603.22370).
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockscale.algorithms.divergence_loss import mean_divergence
from blockscale.algorithms.learned_rounding import RoundingMethod, learn_rounding
from blockscale.checkpoint.linear import QuantizedLinear
from blockscale.checkpoint.reader import Checkpoint, open_checkpoint
from blockscale.checkpoint.target import check_absent
from blockscale.conversion.rewrite import source_record
from blockscale.errors import ModelError
from blockscale.formats.nvfp4 import decode_unscaled
from blockscale.formats.packing import pack_nibbles
from blockscale.formats.spec import NVFP4
from blockscale.host.linear import KeptLinear
from blockscale.host.model import HostedModel, check_device, check_ids, load_model
from blockscale.quantization.calibration_data import CalibrationData
from blockscale.quantization.learning.batches import Batch, make_batches, step_windows, vocabulary_size
from blockscale.quantization.learning.changes import find_changes, sqnr_db
from blockscale.quantization.learning.memory import check_learnable
from blockscale.quantization.learning.starting_points import unrounded_weight
from blockscale.quantization.learning.student import Student, open_student
from blockscale.quantization.learning.write import write_learned
from blockscale.quantization.summary import Learning

Progress = Callable[[str, int, int], None]

# Of steps of so many tokens. Of fewer, gradients are noisier by the square root, and Adam makes steps of noise too.
_LR, _GAIN_LR, _LR_TOKENS = 5e-3, 1e-3, 4096
_WARMUP_SHARE = 0.05
_NUM_CHECKS = 10


@dataclass(frozen=True)
class Learned:
    """`sqnr_db`: of linears that learned, against the weights that they were rounded from."""

    out: Path
    num_bytes: int
    learning: Learning
    sqnr_db: Mapping[str, float]
    notices: tuple[str, ...]


def learn(
    path: Path,
    source: Checkpoint,
    data: CalibrationData,
    out: Path,
    *,
    steps: int,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Learned:
    """Writes the quantized checkpoint at `path` to the folder `out` with codes, block scales and gains learned.

    source  the model that it was made from, in 16 bits

    Every eighth window is held back and judges; the result is never worse there than what was given. The same inputs
    give the same bytes on a CPU. ModelError where it does not fit into memory, for models of two vocabularies, and
    where logits are not finite; CheckpointError if nothing at `path` is NVFP4.
    """
    check_absent(out)
    check_device(device)
    checkpoint = open_checkpoint(path)
    linears = checkpoint.quantized.linears.values() if checkpoint.quantized else ()
    num_weights = sum(torch.Size(linear.shape).numel() for linear in linears if linear.scheme.weight is NVFP4)
    left = check_room(num_weights, source, data.windows.shape[1], device)
    student, teacher = open_student(path, device), load_model(source.path, device=device)
    for hosted in (student.hosted, teacher):
        check_ids(data.windows, hosted.model)
    size = step_windows(data.windows.shape[1], source.folder.config, device)
    num_tokens = size * data.windows.shape[1]
    pace = min(1.0, math.sqrt(num_tokens / _LR_TOKENS))
    if student.activation_bytes(num_tokens) > left:
        student.recompute_layers()
    batches = make_batches(data.windows, size, teacher)
    before, gains_before = student.stored(), student.gain_values()
    unrounded = _unrounded(student, teacher)

    def loss(values: dict[str, Tensor], batch: Batch) -> Tensor:
        return mean_divergence(student.logits(batch.ids, values), batch.teacher_logits(teacher))

    with _working_on(device):
        found = learn_rounding(
            loss,
            {n: _decoded(*before[n]) if weight is None else weight for n, weight in unrounded.items()},
            {name: scale for name, (_, scale) in before.items()},
            {name: torch.ones(()) for name in before},  # the linear multiplies by its own
            batches=batches.train,
            held_back=batches.held,
            codes={name: codes for name, (codes, _) in before.items()},
            method=RoundingMethod.LATENT,
            steps=steps,
            lr=_LR * pace,
            vectors=gains_before,
            vector_lr=_GAIN_LR * pace,
            warmup_steps=round(_WARMUP_SHARE * steps),
            num_checks=_NUM_CHECKS,
            seed=seed,
            on_step=lambda step: progress("learning", step, steps) if progress else None,
        )
    changes = find_changes(before, gains_before, found, steps, seed)
    sqnr = {
        name: sqnr_db(*changes.linears.get(name, before[name]), weight)
        for name, weight in unrounded.items()
        if weight is not None
    }
    record = _with_learning(source_record(path) or {}, changes.learning, sqnr)
    num_bytes = write_learned(checkpoint, changes.linears, changes.gains, out, record, progress)
    notices = batches.notices
    if found.num_skipped:
        notices += (f"{found.num_skipped} of {steps} learning steps moved nothing: NaN or Inf came of them",)
    return Learned(Path(os.path.abspath(out)), num_bytes, changes.learning, sqnr, notices)


def check_room(num_weights: int, source: Checkpoint, length: int, device: str) -> int:
    """What is left of the memory beside `num_weights` that learn from windows of `length` tokens. ModelError if there
    is not enough."""
    config = source.folder.config
    num_logits = step_windows(length, config, device) * length * vocabulary_size(config)
    return check_learnable(num_weights, source.folder.num_bytes, num_logits, device)


def _unrounded(student: Student, teacher: HostedModel) -> dict[str, Tensor | None]:
    """Of each linear what its codes were rounded from, fp32 [..., K] without the global scale, as far as it can be
    told."""
    modules: dict[str, Any] = dict(teacher.model.named_modules())
    return {
        name: _unrounded_linear(packed.linear, modules.get(student.paths[name]))
        for name, packed in student.linears.items()
    }


def _unrounded_linear(linear: QuantizedLinear, module: Any) -> Tensor | None:
    if not isinstance(module, KeptLinear):
        return None
    factor = linear.weight.global_scale
    assert factor is not None
    stored = decode_unscaled(linear.weight.packed, linear.weight.block_scale)
    branch = torch.zeros_like(stored)
    if linear.low_rank is not None:
        branch = linear.low_rank.up.float() @ linear.low_rank.down.float() / factor
    whole = unrounded_weight(stored + branch, module.weight.detach().float() / factor)
    return None if whole is None else whole - branch


def _decoded(codes: Tensor, block_scale: Tensor) -> Tensor:
    return decode_unscaled(pack_nibbles(codes), block_scale)


def _with_learning(record: Mapping[str, Any], learning: Learning, sqnr: Mapping[str, float]) -> Mapping[str, Any]:
    """The record of the checkpoint before, with what learning did to it."""
    layers = record.get("layers")
    if isinstance(layers, Mapping):
        layers = {n: {**layer, "sqnr_db": sqnr.get(n, layer.get("sqnr_db"))} for n, layer in layers.items()}
        record = {**record, "layers": layers}
    return {**record, "learning": asdict(learning)}


@contextmanager
def _working_on(device: str) -> Iterator[None]:
    """On GPUs with TF32 products: it holds what NVFP4 weights and activations are made of, and gradients need no more.
    ModelError where memory runs out after all."""
    precision = torch.get_float32_matmul_precision()
    if device != "cpu":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    except torch.OutOfMemoryError as e:
        raise ModelError(f"learning: the memory of {device} has run out", hint="close what else uses it") from e
    finally:
        torch.set_float32_matmul_precision(precision)
