"""What `/info` says of the served model: formats and sizes of its weights, its cache, and the kernels that serve it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blockscale.engine.model import Model
from blockscale.engine.parallel import ParallelModel
from blockscale.inspection.contents import inspect_folder
from blockscale.inspection.inventory import FormatTotal, Linear, bits_per_parameter
from blockscale.kernels.device import Device, describe
from blockscale.kernels.paged_cache import KVFormat
from blockscale.kernels.select import Choice, Op, usable
from blockscale.models.caches import cache_dtype
from blockscale.models.decoder import Decoder

_PACKED = ("nvfp4", "mxfp4")


@dataclass(frozen=True)
class ModelFacts:
    """weights    what is stored, by format, the largest first
    kv_format  of the cache: "bf16", "fp16", "fp8" or "nvfp4"
    device     its name
    kernels    of the ops that the weights and the cache go through, in the order of `Op`; products of 16-bit and FP8
               weights are torch's own and in no list. An op whose kernels depend on the number of rows has several
    """

    architecture: str
    weights: tuple[FormatTotal, ...]
    kv_format: str
    device: str
    kernels: tuple[Choice, ...]

    @property
    def num_parameters(self) -> int:
        return sum(total.num_parameters for total in self.weights)

    @property
    def num_bytes(self) -> int:
        return sum(total.num_bytes for total in self.weights)

    def to_dict(self) -> dict[str, Any]:
        return {
            "architecture": self.architecture,
            "num_parameters": self.num_parameters,
            "bytes": self.num_bytes,
            "bits_per_parameter": bits_per_parameter(self.num_bytes, self.num_parameters),
            "formats": [
                {
                    "format": total.format,
                    "num_parameters": total.num_parameters,
                    "bytes": total.num_bytes,
                    "bits_per_parameter": bits_per_parameter(total.num_bytes, total.num_parameters),
                }
                for total in self.weights
            ],
            "kv_format": self.kv_format,
            "device": self.device,
            "kernels": [
                {
                    "op": choice.op.value,
                    "kernel": choice.kernel.value,
                    "mode": choice.mode.value,
                    "reason": choice.reason,
                    "min_rows": choice.min_m,
                    "max_rows": choice.max_m,
                }
                for choice in self.kernels
            ],
        }


def facts_of(folder: Path, model: Model, *, emulate_activations: bool = False) -> ModelFacts | None:
    """Of a model that was loaded from `folder`; None for one that is no decoder of this package."""
    if isinstance(model, ParallelModel):
        model = model.decoder
    if not isinstance(model, Decoder):
        return None
    return read_facts(
        folder,
        device=model.device,
        kv_format=model.kv_format,
        dtype=cache_dtype(model.dtype),
        is_latent=model.config.latent is not None,
        emulate_activations=emulate_activations,
    )


def read_facts(
    folder: Path,
    *,
    device: torch.device | str,
    kv_format: KVFormat,
    dtype: torch.dtype = torch.bfloat16,
    is_latent: bool = False,
    emulate_activations: bool = False,
) -> ModelFacts:
    """From the checkpoint's headers and the device.

    dtype                of a cache of 16 bits
    is_latent            attention keeps a latent vector a token, as DeepSeek's does
    emulate_activations  inputs are rounded as the checkpoint says

    CheckpointError where there is no checkpoint, FormatError for a device without kernels.
    """
    found = inspect_folder(folder)
    machine = describe(device)
    ops = _ops(found.linears, is_latent, emulate_activations) | _between(kv_format, is_latent, machine)
    sixteen = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    cache = sixteen.get(dtype, str(dtype).removeprefix("torch.")) if kv_format is KVFormat.BITS16 else kv_format.value
    kernels = tuple(choice for op in Op if op in ops for choice in _by_rows(op, machine))
    return ModelFacts(found.architecture, found.by_format, cache, machine.name, kernels)


def _ops(linears: Iterable[Linear], is_latent: bool, is_emulated: bool) -> set[Op]:
    ops = {Op.ATTENTION_MLA} if is_latent else {Op.ATTENTION_DECODE, Op.ATTENTION_PREFILL}
    for linear in linears:
        weight = linear.weight
        if weight.format not in _PACKED:
            continue
        if is_emulated and weight.activation == "nvfp4":
            ops |= {Op.LINEAR_W4A4, Op.QUANTIZE_NVFP4}
        elif ".experts." in weight.name and weight.rank == 0:
            ops.add(Op.MOE_W4A16)
        else:
            ops.add(Op.LINEAR_W4A16)
    return ops


def _between(kv_format: KVFormat, is_latent: bool, device: Device) -> set[Op]:
    """What stands between linears, and what writes the cache."""
    if device.type == "cuda" and not is_latent:
        return {Op.ADD_RMS_NORM, Op.GATED, Op.ROTATE_INTO_CACHE}
    ops = set() if kv_format is KVFormat.BITS16 else {Op.QUANTIZE_KV}
    return ops | ({Op.ADD_RMS_NORM, Op.GATED} if device.type == "cuda" else set())


def _by_rows(op: Op, device: Device) -> Iterator[Choice]:
    """The op's kernel for one row of activations, then those that take over where there are more."""
    choices, rows = usable(op, device), 1
    while True:
        choice = next(choice for choice in choices if choice.is_for(rows))
        yield choice
        if choice.max_m is None:
            return
        rows = choice.max_m + 1
