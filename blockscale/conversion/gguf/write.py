"""Writing the file: laid out from headers, then one tensor at a time, whole or not at all."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, LlamaFileType

from blockscale.checkpoint.dialects import branches
from blockscale.checkpoint.output import partial_path
from blockscale.checkpoint.reader import Checkpoint
from blockscale.checkpoint.target import disk_errors
from blockscale.conversion.gguf.families import Family
from blockscale.conversion.gguf.hyperparameters import (
    add_hyperparameters,
    check_graph,
    find_families,
    geometry_of,
    read_config,
    size,
)
from blockscale.conversion.gguf.layout import Layout, choose_family, make_layout
from blockscale.conversion.gguf.rope import Rope, add_rope, num_rotated, read_rope
from blockscale.conversion.gguf.rows import Geometry
from blockscale.conversion.gguf.units import TensorPlan, Unit, generated_unit
from blockscale.conversion.gguf.vocabulary import Vocabulary, add_vocabulary, read_vocabulary
from blockscale.conversion.gguf.weights import Inventory, take_inventory
from blockscale.conversion.summary import residual_notices
from blockscale.errors import CheckpointError, OutputError, UsageError

Progress = Callable[[str, int, int], None]  # stage, done, total, in bytes

# What matrices that are not copied are stored as.
KEPT: dict[str, tuple[GGMLQuantizationType, LlamaFileType]] = {
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
_PACKED_FILE_TYPES = {"NVFP4": LlamaFileType.MOSTLY_NVFP4, "MXFP4": LlamaFileType.MOSTLY_MXFP4_MOE}


@dataclass(frozen=True)
class GgufSummary:
    """architecture   llama.cpp's name for what the file holds
    num_weights    by GGML's type: "NVFP4", "BF16", "F32" ...
    num_decoded    quantized weights whose codes are not in the file; all others have the checkpoint's values exactly
    notices        what is not written as it is stored, or computed otherwise by llama.cpp
    """

    path: Path
    architecture: str
    num_bytes: int
    num_weights: dict[str, int]
    num_decoded: int
    notices: tuple[str, ...]


def write_gguf(
    checkpoint: Checkpoint, out: Path, progress: Progress | None = None, *, kept: str | None = None
) -> GgufSummary:
    """Writes the whole model, tokenizer and chat template to `out`, a file that must not exist.

    NVFP4 and MXFP4 codes and scales are copied; `kept` ("bf16", "f16" or "q8_0") is what other matrices become, by
    default "f16" for a model that was trained in it and "bf16" for others; vectors and routers are fp32.
    UsageError for another `kept`; OutputError for a target that exists or cannot be written; CheckpointError for an
    architecture, a tokenizer or a tensor that llama.cpp does not have.
    """
    kept = kept or ("f16" if checkpoint.dtype == torch.float16 else "bf16")
    if kept not in KEPT:
        raise UsageError(f"kept matrices cannot be {kept!r}", hint="choose one of " + ", ".join(KEPT))
    out = Path(os.path.abspath(out))
    _check_free(out)
    _check_branches(checkpoint)
    config = read_config(checkpoint.path)
    families = find_families(config)
    inventory = take_inventory(checkpoint)
    geometry = geometry_of(config, _num_tokens(inventory, config))
    can_be_other = num_rotated(config, geometry) == geometry.head_dim
    family = choose_family(families, inventory, can_be_other=can_be_other)
    rope = read_rope(config, family, geometry)
    notices = [*_left_out(checkpoint, inventory), *check_graph(config, family, geometry), *rope.notices]
    if family is not families.own:
        notices.append(f"written as architecture '{family.architecture}', whose graph applies every scale")
    vocabulary = read_vocabulary(checkpoint.path, config, geometry.num_tokens)
    notices += vocabulary.notices
    is_tied = bool(getattr(config, "tie_word_embeddings", False))
    layout = make_layout(family, inventory, geometry, KEPT[kept][0], is_tied=is_tied)
    units = [*layout.units, *(generated_unit(name, values) for name, values in rope.tensors.items())]
    writer = gguf.GGUFWriter(None, family.architecture)
    for tensor in (t for unit in units for t in unit.tensors):
        writer.add_tensor_info(tensor.name, tensor.byte_shape, np.dtype(np.uint8), tensor.num_bytes, tensor.kind)
    _add_metadata(writer, checkpoint, config, family, geometry, rope, layout, vocabulary, kept)
    with disk_errors(out), _appearing(out) as partial:
        _write(writer, partial, units, progress)
    num_bytes = out.stat().st_size
    notices += layout.notices
    return GgufSummary(out, family.architecture, num_bytes, layout.kinds, layout.num_decoded, tuple(notices))


def _num_tokens(inventory: Inventory, config: Any) -> int:
    embedding = inventory.find("model.embed_tokens")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError("the checkpoint has no model.embed_tokens", hint="it is incomplete: download it again")
    rows, columns = embedding.shape
    if columns != size(config, "hidden_size"):
        raise CheckpointError(
            f"{embedding.name} {list(embedding.shape)}: config.json has hidden_size {config.hidden_size}",
            hint="config.json belongs to another model",
        )
    return rows


def _check_branches(checkpoint: Checkpoint) -> None:
    for linear in checkpoint.quantized.linears.values() if checkpoint.quantized else ():
        if branches.has_low_rank(linear.tensors):
            raise CheckpointError(
                f"{linear.name}: GGUF has no place for a low-rank branch beside a weight",
                hint="take --to bf16, which adds it to the weight, and convert that",
            )


def _left_out(checkpoint: Checkpoint, inventory: Inventory) -> list[str]:
    notices = []
    if inventory.left_out:
        notices.append(
            f"{len(inventory.left_out)} tensors of the vision tower are left out: llama.cpp has another file for them"
        )
    if checkpoint.quantized and checkpoint.quantized.kv_tensors:
        notices.append("scales of the key-value cache are left out: GGUF has no place for them")
    if checkpoint.quantized:
        notices += residual_notices(checkpoint.quantized, "GGUF has no place for them")
    return notices


def _add_metadata(
    writer: gguf.GGUFWriter,
    checkpoint: Checkpoint,
    config: Any,
    family: Family,
    geometry: Geometry,
    rope: Rope,
    layout: Layout,
    vocabulary: Vocabulary,
    kept: str,
) -> None:
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(vocabulary.model_name(checkpoint.path.resolve().name))
    writer.add_size_label(gguf.size_label(*writer.get_total_parameter_count()))
    writer.add_quantized_by(f"blockscale {version('blockscale')}")
    packed = [kind for kind in _PACKED_FILE_TYPES if kind in layout.kinds]
    writer.add_file_type(_PACKED_FILE_TYPES[packed[0]] if packed else KEPT[kept][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if layout.wide_activations:
        writer.add_array("general.tensor_extra.name", layout.wide_activations)
        writer.add_array("general.tensor_extra.prec_a4", [False] * len(layout.wide_activations))
    add_hyperparameters(writer, config, family, geometry)
    add_rope(writer, rope)
    add_vocabulary(writer, vocabulary)


def _write(writer: gguf.GGUFWriter, path: Path, units: list[Unit], progress: Progress | None) -> None:
    plans: list[TensorPlan] = [tensor for unit in units for tensor in unit.tensors]
    done, total = 0, sum(plan.num_bytes for plan in plans)
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        file = writer.fout[0]
        writer.write_padding(file, file.tell())
        for unit in units:
            for plan, data in zip(unit.tensors, unit.make(), strict=True):
                assert data.shape == plan.byte_shape, plan.name
                file.write(data.data)  # the writer's own way, ndarray.tofile, hides why a disk refused
                writer.write_padding(file, plan.num_bytes)
                done += plan.num_bytes
            if progress:
                progress("writing", done, total)
        writer.flush()
    finally:
        writer.close()


def _check_free(out: Path) -> None:
    if os.path.lexists(out):
        raise OutputError(f"{out} exists already", hint="choose another name or remove it first")


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A hidden file beside the target, which takes its name if all goes well and is removed if not."""
    partial = partial_path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        os.close(descriptor)
        raise OutputError(f"{out} is being written by another process", hint="wait for it") from e
    try:
        yield partial
        _check_free(out)
        os.fsync(descriptor)
        os.replace(partial, out)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
