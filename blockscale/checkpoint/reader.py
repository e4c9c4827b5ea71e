"""Any checkpoint this program reads, opened by its config: 16-bit, modelopt or compressed-tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.checkpoint.dialects import compressed_tensors, modelopt
from blockscale.checkpoint.dialects.stored import StoredModel
from blockscale.checkpoint.faults import raise_first
from blockscale.checkpoint.folder import Folder, open_folder
from blockscale.checkpoint.record import read_activation_scale
from blockscale.checkpoint.source import SourceTensor, as_itself, view_as_16bit

DIALECTS = {"modelopt": modelopt, "compressed-tensors": compressed_tensors}


@dataclass(frozen=True)
class Checkpoint:
    """An opened model: quantized linears (None: a 16-bit model) and everything else as 16-bit tensors.

    activation_scale  how the block scales of NVFP4 activations are meant to be chosen
    """

    folder: Folder
    quantized: StoredModel | None
    kept: Mapping[str, SourceTensor]
    activation_scale: ActivationScale = ActivationScale.AMAX

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def dtype(self) -> torch.dtype:
        """The 16-bit (or 32-bit) type that the model was trained or cast to."""
        return config_dtype(self.folder)


def config_dtype(folder: Folder) -> torch.dtype:
    sections = (folder.config, folder.config.get("text_config") or {})
    name = next((s[key] for s in sections for key in ("dtype", "torch_dtype") if s.get(key)), None)
    return {"float16": torch.float16, "float32": torch.float32}.get(str(name).removeprefix("torch."), torch.bfloat16)


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads headers only. CheckpointError for anything missing, contradictory or unknown."""
    folder = open_folder(path)
    if folder.method not in DIALECTS:
        return Checkpoint(folder, None, view_as_16bit(folder).tensors)
    quantized = DIALECTS[folder.method].read_model(folder)
    raise_first(quantized.faults)
    taken = {info.name for linear in quantized.linears.values() for info in linear.tensors.values()}
    taken |= {info.name for pair in quantized.kv_tensors.values() for info in pair}
    kept = {n: as_itself(info) for n, info in folder.tensors.items() if n not in taken}
    return Checkpoint(folder, quantized, kept, read_activation_scale(path))


def bits_per_parameter(checkpoint: Checkpoint) -> float:
    """Stored bits over the parameters they stand for; scales count as bits, not as parameters."""
    count = sum(math.prod(tensor.shape) for tensor in checkpoint.kept.values())
    if checkpoint.quantized is not None:
        count += sum(math.prod(linear.shape) for linear in checkpoint.quantized.linears.values())
    return 8 * checkpoint.folder.num_bytes / count
