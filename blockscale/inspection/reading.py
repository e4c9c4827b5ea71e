"""A checkpoint as far as it can be read: everything found, and everything that is wrong with it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from blockscale.checkpoint.dialects import compressed_tensors, modelopt
from blockscale.checkpoint.dialects.stored import StoredModel
from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.folder import Folder, survey_folder
from blockscale.checkpoint.header import TensorInfo
from blockscale.checkpoint.record import RECORD_NAME, read_activation_scale
from blockscale.errors import CheckpointError

_READERS = {"modelopt": modelopt.read_model, "compressed-tensors": compressed_tensors.read_model}


@dataclass(frozen=True)
class Reading:
    """`model` is None where nothing is stored in a dialect: 16-bit models, FP8-block, gpt-oss, AWQ and GPTQ sources.

    kept     every tensor that belongs to no quantized linear and no KV cache
    faults   of the files, then of config and tensors
    """

    folder: Folder
    model: StoredModel | None
    kept: Mapping[str, TensorInfo]
    faults: tuple[Fault, ...]


def read_folder(path: Path) -> Reading:
    """Headers and configs only, whatever is wrong with them. CheckpointError only where there is no folder."""
    return read_surveyed(survey_folder(path))


def read_surveyed(folder: Folder) -> Reading:
    """The same of a folder that has been looked at already."""
    faults = list(folder.faults)
    method = folder.method
    if method is None:
        method = _dialect_by_names(folder)
        if method is not None:
            what = f"{folder.path}: tensors are packed ({method} names), but no config says so"
            hint = "engines would read the codes as 16-bit weights, or stop at their shapes"
            faults.append(Fault("no-quantization-config", "config.json", what, hint))
    if method not in _READERS:
        return Reading(folder, None, folder.tensors, tuple(faults))
    if "quantization_config" not in folder.config:
        # readers look there; what hf_quant_config.json holds, they find by themselves
        folder = Folder(
            folder.path,
            {**folder.config, "quantization_config": {"quant_method": method}},
            folder.tensors,
            folder.companions,
            folder.quant_config,
            folder.faults,
        )
    model = _READERS[method](folder)
    taken = {info.name for linear in model.linears.values() for info in linear.tensors.values()}
    taken |= {info.name for pair in model.kv_tensors.values() for info in pair}
    kept = {name: info for name, info in folder.tensors.items() if name not in taken}
    is_known = {fault.rule for fault in faults}
    # with no config at all, that it names no algorithm is no second fault
    hidden = {"unknown-algorithm"} if "no-quantization-config" in is_known else set[str]()
    if is_known & {"unreadable-file", "missing-shard"}:
        hidden.add("nothing-quantized")  # what is quantized may lie in there
    faults += (fault for fault in model.faults if fault.rule not in hidden)
    faults += _record_faults(folder)
    return Reading(folder, model, kept, tuple(faults))


def _record_faults(folder: Folder) -> Iterator[Fault]:
    try:
        read_activation_scale(folder.path)
    except CheckpointError as e:
        yield Fault("unknown-activation-scale", RECORD_NAME, str(e), e.hint)


def _dialect_by_names(folder: Folder) -> str | None:
    """Of a folder whose config names none."""
    scales = [info for name, info in folder.tensors.items() if name.endswith(".weight_scale")]
    if any(info.name.removesuffix("_scale") + "_packed" in folder.tensors for info in scales):
        return "compressed-tensors"
    return "modelopt" if any(info.dtype in ("F8_E4M3", "U8") for info in scales) else None
