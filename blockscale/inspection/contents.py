"""What a checkpoint holds: each fused group and kept tensor with its format, size and scales, and who can load it.

Headers, configs and the scales that stand alone are read; block scales only when asked for. Needs no torch.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from blockscale.checkpoint.dialects.stored import StoredModel
from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.groups import FUSED_LEAVES, fused_groups
from blockscale.checkpoint.header import TensorInfo
from blockscale.checkpoint.shards import read_json
from blockscale.errors import CheckpointError
from blockscale.formats.spec import FORMATS
from blockscale.inspection.census import Census, one_byte_scale, read_scalars, take_census
from blockscale.inspection.checks.config import config_faults
from blockscale.inspection.checks.global_scales import (
    FP8_WEIGHT,
    INPUT,
    WEIGHT,
    GlobalScale,
    fused_faults,
    global_scales,
    odd_faults,
    reversed_faults,
    reversed_scales,
    stored_scales,
    value_faults,
)
from blockscale.inspection.checks.structure import part_faults
from blockscale.inspection.collection import no_collection
from blockscale.inspection.engines import KNOWN_METHODS, verdicts
from blockscale.inspection.inventory import Inspection, Kept, KVCache, Layer, Linear, range_of
from blockscale.inspection.matrices import matrices_of
from blockscale.inspection.reading import Reading, read_folder
from blockscale.inspection.weights import Weight, plain_format, stored_weights

Progress = Callable[[str, int, int], None]  # stage, done, total


@no_collection()
def inspect_folder(path: Path, *, with_scales: bool = False, progress: Progress | None = None) -> Inspection:
    """Looks at a folder whatever is wrong with it. `with_scales`: every block scale is read and counted.

    CheckpointError only where there is no folder.
    """
    reading = read_folder(path)
    folder, model = reading.folder, reading.model
    weights, reasons = stored_weights(reading)
    scales, notices = _read_scales(reading)
    multipliers = {(scale.where, scale.kind): scale.multiplier for scale in scales}
    censuses: dict[str, Census] = {}
    if with_scales:
        censuses, unread = _take_censuses(weights, progress)
        notices += unread
    linears = {w.name: _linear(w, multipliers, censuses) for w in weights}
    groups = [tuple(sorted(members, key=_place)) for members in fused_groups(linears).values()]
    layers = tuple(Layer(short_name(members), tuple(linears[m] for m in members)) for members in groups)
    written_by, recipe = _record(path)
    matrices = matrices_of(reading)
    more_faults = (
        *config_faults(reading, matrices),
        *part_faults(reading, matrices),
        *_faults_of_values(scales),
        *_faults_of_bytes(censuses),
    )
    faults = {(fault.rule, fault.where): fault for fault in (*reading.faults, *more_faults)}
    return Inspection(
        path,
        model.dialect if model is not None else folder.method,
        _architecture(folder.config),
        written_by or _producer(folder.config, folder.quant_config),
        recipe,
        layers,
        tuple(_kept(folder.tensors[name], reason) for name, reason in reasons.items()),
        None if model is None else _kv_cache(model, multipliers),
        folder.num_bytes,
        tuple(faults.values()),
        verdicts(reading, more_faults),
        (*notices, *_unknown_method(reading)),
    )


def _read_scales(reading: Reading) -> tuple[list[GlobalScale], list[str]]:
    """Those that stand alone."""
    if reading.model is None:
        return [], []
    try:
        return global_scales(reading.model, read_scalars(stored_scales(reading.model))), []
    except CheckpointError as e:
        return [], [f"scales are not shown: {e}"]


def _linear(weight: Weight, multipliers: Mapping[tuple[str, str], float], censuses: Mapping[str, Census]) -> Linear:
    name = weight.name
    global_scale = multipliers.get((name, WEIGHT), multipliers.get((name, FP8_WEIGHT)))
    return Linear(weight, global_scale, multipliers.get((name, INPUT)), censuses.get(name))


def _take_censuses(weights: Iterable[Weight], progress: Progress | None) -> tuple[dict[str, Census], list[str]]:
    """Of the block scales of each weight that has some of one byte, by its name."""
    todo = [(w.name, w.block_scale, FORMATS[w.format].scale) for w in weights if w.block_scale is not None]
    done, total = 0, sum(info.num_bytes for _, info, _ in todo)
    censuses = {}
    for name, info, scale_type in todo:
        if one_byte_scale(info, scale_type):
            try:
                censuses[name] = take_census(info, scale_type)
            except CheckpointError as e:
                return censuses, [f"not all block scales are shown: {e}"]
        done += info.num_bytes
        if progress:
            progress("reading scales", done, total)
    return censuses, []


def _faults_of_values(scales: Sequence[GlobalScale]) -> list[Fault]:
    """What `lint` finds without reading block scales."""
    backwards = reversed_scales(scales, lambda _: None)
    return [
        *value_faults(scales),
        *reversed_faults(backwards),
        *odd_faults(scales, backwards),
        *fused_faults(scales, frozenset(backwards)),
    ]


def _faults_of_bytes(censuses: Mapping[str, Census]) -> Iterator[Fault]:
    for name, census in censuses.items():
        if census.num_nan:
            yield Fault("nan-block-scale", name, f"{name}: {census.num_nan} block scales are NaN")


def _kept(info: TensorInfo, reason: str) -> Kept:
    return Kept(info.name, plain_format(info), info.shape, info.num_bytes, reason)


def _kv_cache(model: StoredModel, multipliers: Mapping[tuple[str, str], float]) -> KVCache | None:
    if not (model.kv_format or model.kv_tensors):
        return None
    keys, values = (
        range_of(multipliers.get((attention, kind)) for attention in model.kv_tensors)
        for kind in ("key scale", "value scale")
    )
    return KVCache(model.kv_format, len(model.kv_tensors), keys, values)


_PLACES = {leaf: i for leaves in FUSED_LEAVES for i, leaf in enumerate(leaves)}


def _place(member: str) -> int:
    """Among those that it is fused with."""
    return next((_PLACES[part] for part in reversed(member.split(".")) if part in _PLACES), 0)


def short_name(members: tuple[str, ...]) -> str:
    """`a.q_proj`, `a.k_proj` -> `a.q+k_proj`: what they share before the last dot, and from an underscore or dot on."""
    if len(members) == 1:
        return members[0]
    shared = _shared_start(members)
    parent = shared[: shared.rfind(".") + 1]
    leaves = [member[len(parent) :] for member in members]
    ending = _shared_start([leaf[::-1] for leaf in leaves])[::-1]
    found = re.search(r"[._]", ending)
    tail = ending[found.start() :] if found else ""
    return parent + "+".join(leaf.removesuffix(tail) for leaf in leaves) + tail


def _shared_start(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:length]


# ---------------------------------------------------------------- where it comes from


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else config.get("model_type")
    return first if isinstance(first, str) else ""


def _producer(config: Mapping[str, Any], quant_config: Mapping[str, Any] | None) -> str:
    quantization = config.get("quantization_config") or {}
    for section in (quantization, quant_config or {}):
        producer = section.get("producer")
        if isinstance(producer, Mapping) and isinstance(producer.get("name"), str):
            return f"{producer['name']} {producer.get('version', '')}".strip()
    version = quantization.get("version")
    method = quantization.get("quant_method")
    return f"{method} {version}" if isinstance(method, str) and isinstance(version, str) and method != "awq" else ""


def _record(path: Path) -> tuple[str, str]:
    """Who wrote it and by which recipe, where blockscale did."""
    file = path / "blockscale.json"
    try:
        record = read_json(file) if file.is_file() else {}
    except CheckpointError:  # what it says is a remark, not the model
        return "", ""
    version, recipe = record.get("blockscale"), record.get("recipe")
    return (
        f"blockscale {version}" if isinstance(version, str) else "",
        recipe if isinstance(recipe, str) else "",
    )


def _unknown_method(reading: Reading) -> Iterator[str]:
    method = reading.folder.method
    if reading.model is None and method not in KNOWN_METHODS:
        yield f"quantized with {method}, which is not read: tensors are counted as they are stored"
