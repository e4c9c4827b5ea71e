"""Checkpoint to checkpoint: to the other dialect, to 16 bits, or MXFP4 to NVFP4."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from blockscale.checkpoint.dialects import branches
from blockscale.checkpoint.dialects.stored import StoredModel
from blockscale.checkpoint.linear import MXFP4_W4A4
from blockscale.checkpoint.reader import DIALECTS, Checkpoint
from blockscale.checkpoint.record import activation_scale_entry
from blockscale.checkpoint.structure import nearest, with_untied_head
from blockscale.conversion.rewrite import Progress, Written, source_record, write_checkpoint
from blockscale.conversion.summary import ConversionSummary, residual_notices
from blockscale.conversion.to_16bit import plain_jobs
from blockscale.conversion.to_dialect import check_schemes, dialect_jobs, kv_format_in
from blockscale.conversion.to_nvfp4 import GPT_OSS, nvfp4_jobs
from blockscale.errors import CheckpointError
from blockscale.inspection.census import read_scalars
from blockscale.inspection.checks.global_scales import fused_faults, global_scales, stored_scales
from blockscale.inspection.rules import RULES

BF16 = "bf16"


def convert_checkpoint(
    checkpoint: Checkpoint, out: Path, to: str, *, cast_mxfp4: bool = False, progress: Progress | None = None
) -> ConversionSummary:
    """Writes `checkpoint` to the folder `out`, which appears whole or not at all.

    to           a dialect, or "bf16": a plain model of the checkpoint's own 16-bit type
    cast_mxfp4   store MXFP4 weights as NVFP4; gpt-oss' are in any case, as no dialect has them as they are

    CheckpointError for what the target has no place for, and for a source that holds nothing quantized.
    """
    check_weights(checkpoint)
    if to == BF16:
        return _to_16bit(checkpoint, out, progress)
    is_cast = cast_mxfp4 or checkpoint.folder.method == GPT_OSS
    if checkpoint.quantized is None and not is_cast:
        raise _not_quantized(checkpoint)
    jobs = nvfp4_jobs(checkpoint, to) if is_cast else dialect_jobs(checkpoint, to)
    check_schemes(jobs, to)
    model = checkpoint.quantized
    linears = model.linears.values() if model else ()
    written = write_checkpoint(
        out,
        jobs,
        dialect=to,
        config=checkpoint.folder.config,
        kv_format=kv_format_in(checkpoint, to) if model else None,
        has_pre_quant_scale=any("pre_quant_scale" in linear.tensors for linear in linears),
        low_rank={linear.name for linear in linears if branches.has_low_rank(linear.tensors)},
        companions=checkpoint.folder.companions,
        provenance=_provenance(checkpoint, to, keeps_recipe=not is_cast),
        progress=progress,
    )
    return _summary(checkpoint, written, to, _notices(checkpoint, to, is_cast))


def _to_16bit(checkpoint: Checkpoint, out: Path, progress: Progress | None) -> ConversionSummary:
    model = checkpoint.quantized
    jobs = plain_jobs(checkpoint)
    written = write_checkpoint(
        out,
        jobs,
        dialect=None,
        config=with_untied_head(checkpoint.folder.config, model.linears if model else ()),
        companions=checkpoint.folder.companions,
        provenance=_provenance(checkpoint, BF16, keeps_recipe=False),
        progress=progress,
    )
    notices: tuple[str, ...] = ()
    if model is not None:
        notices = ("the scales of the KV cache are left out: 16 bits need none",) if model.kv_tensors else ()
        notices += residual_notices(model, "a 16-bit model rounds no inputs")
    if not num_quantized(checkpoint):
        notices = ("the model is in 16 bits already: its tensors are copied",)
    return _summary(checkpoint, written, BF16, notices)


def num_quantized(checkpoint: Checkpoint) -> int:
    """How many weights of the checkpoint are stored in fewer than 16 bits; a stack of experts is one."""
    model = checkpoint.quantized
    decoded = sum(not tensor.is_plain for tensor in checkpoint.kept.values())
    return decoded + (len(model.linears) if model is not None else 0)


def _summary(checkpoint: Checkpoint, written: Written, to: str, notices: tuple[str, ...]) -> ConversionSummary:
    return ConversionSummary(
        written.out,
        to,
        checkpoint.folder.num_bytes,
        written.num_bytes,
        num_quantized(checkpoint),
        not written.errors,
        written.errors,
        notices,
    )


def _notices(checkpoint: Checkpoint, to: str, is_cast: bool) -> tuple[str, ...]:
    model = checkpoint.quantized
    if model is None:
        return ()
    notices = list(_fused_notices(model))
    if to != model.dialect:
        notices += residual_notices(model, "the result is the checkpoint of standard layout that engines load")
    if kv_format_in(checkpoint, to) != model.kv_format:
        notices.append(f"{to} has no name for a KV cache in {model.kv_format}: its scales are left out, it has 16 bits")
    if is_cast and any(linear.scheme == MXFP4_W4A4 for linear in model.linears.values()):
        notices.append("activations that were MXFP4 stay in 16 bits: NVFP4's have a scale that only calibration finds")
    return tuple(notices)


def _fused_notices(model: StoredModel) -> Iterator[str]:
    """Values are kept, and so is what engines make of them."""
    scales = global_scales(model, read_scalars(stored_scales(model)))
    faults = list(fused_faults(scales, frozenset()))
    if faults:
        first, count = faults[0], len(faults)
        groups = "1 fused group has" if count == 1 else f"{count} fused groups have"
        yield (
            f"{groups} members with different scales ({RULES[first.rule].code}), first {first.where}: engines will "
            "misread them; `blockscale lint --repair` mends that"
        )


def _provenance(checkpoint: Checkpoint, to: str, *, keeps_recipe: bool) -> Mapping[str, Any]:
    record = source_record(checkpoint.path)
    recipe = {"recipe": record["recipe"]} if record and keeps_recipe and "recipe" in record else {}
    conversion = {"from": checkpoint.folder.method or "16-bit", "to": to}
    activations = {} if to == BF16 else activation_scale_entry(checkpoint.activation_scale)
    return {**recipe, **activations, "conversion": conversion, "source": record}


def check_weights(checkpoint: Checkpoint) -> None:
    """CheckpointError for a weight without elements, and for one that a further matrix belongs to: what it stands for
    is more than its codes, scales and branches."""
    linears = checkpoint.quantized.linears if checkpoint.quantized else {}
    for linear in linears.values():
        if 0 in linear.shape:
            raise CheckpointError(f"{linear.name}: an empty weight {list(linear.shape)}", hint="download it again")
    for tensor in checkpoint.kept.values():
        module = nearest(tensor.name.rpartition(".")[0], linears) if len(tensor.shape) > 1 else None
        if module is not None and tensor.name != f"{module}.weight":  # a second copy is another error
            raise CheckpointError(
                f"'{tensor.name}' belongs to the quantized {module}, and what it does to it is not understood",
                hint="convert a checkpoint that was made without it",
            )


def _not_quantized(checkpoint: Checkpoint) -> CheckpointError:
    method = checkpoint.folder.method
    held = "a 16-bit model" if method is None else f"stored as {method}, which no dialect has"
    return CheckpointError(
        f"{checkpoint.path} is {held}: there are no codes to convert to {' or '.join(DIALECTS)}",
        hint="`blockscale quantize` makes a quantized checkpoint of it",
    )
