"""Whether a quantized folder's config can be written anew from its tensors, and what it says that they do not."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from blockscale.checkpoint.dialects import branches
from blockscale.checkpoint.dialects.compressed_tensors import unread_parts
from blockscale.checkpoint.dialects.stored import StoredLinear, StoredModel
from blockscale.checkpoint.linear import MXFP4_W4A4, MXFP4_W4A16, W8A8_DYNAMIC, Scheme
from blockscale.checkpoint.reader import DIALECTS
from blockscale.checkpoint.structure import nearest
from blockscale.errors import CheckpointError
from blockscale.formats.spec import FP8_CHANNEL
from blockscale.inspection.reading import Reading

# Algorithms and containers that mean more than their codes and scales show. What exists nowhere is a mistake.
_OF_OTHERS = frozenset(
    (
        *("W4A16_AWQ", "W4A8_AWQ", "W8A16", "W8A8_SQ_PER_CHANNEL", "MXFP8"),
        *("W4A8_MXFP4_FP8", "W4A8_MXFP4_MXFP8", "FP8_PB_WO", "FP8_PB_REAL", "FP8_BLOCK_SCALES"),
        *("PACK-QUANTIZED", "INT-QUANTIZED", "NAIVE-QUANTIZED", "MARLIN-24", "SPARSE-BITMASK", "MXFP8-QUANTIZED"),
    )
)
_KV_FORMATS = (None, "fp8", "nvfp4")
_BESIDE_A_WEIGHT = ("bias",)


def with_said_activations(reading: Reading) -> Reading:
    """Weights whose format their tensors had to tell, with the activations that the config's only group names."""
    model = reading.model
    groups = _table(_quantization(reading).get("config_groups"))
    if model is None or len(groups) != 1:
        return reading
    activations = _table(next(iter(groups.values()))).get("input_activations")
    other: dict[Scheme, Scheme] = {}
    if isinstance(activations, Mapping) and activations.get("num_bits") == 4:
        other = {MXFP4_W4A16: MXFP4_W4A4}
    elif activations is None:
        other = {W8A8_DYNAMIC: Scheme(FP8_CHANNEL)}
    linears = {name: _with_scheme(linear, other.get(linear.scheme)) for name, linear in model.linears.items()}
    return replace(reading, model=replace(model, linears=linears))


def _with_scheme(linear: StoredLinear, scheme: Scheme | None) -> StoredLinear:
    return linear if scheme is None else replace(linear, scheme=scheme)


def losses(reading: Reading, model: StoredModel, dropped: frozenset[str]) -> Iterator[str]:
    """What a config written from the tensors would not say any more, a sentence each. `dropped`: tensors that are
    left out of the folder."""
    has_branch = any(branches.has_low_rank(linear.tensors) for linear in model.linears.values())
    unread = _OF_OTHERS if has_branch else _OF_OTHERS | {"NVFP4_SVD"}
    for claim in model.claims:
        for algorithm in {claim.algorithm, *(claim.layers or {}).values()}:
            if algorithm is not None and algorithm.upper() in unread:
                yield f"{claim.file} names {algorithm}, which says more of the weights than their tensors do"
    quantization = _quantization(reading)
    yield from unread_parts(quantization)
    is_unread = bool(quantization.get("kv_cache_scheme")) and model.kv_format is None
    if model.kv_format not in _KV_FORMATS or is_unread:
        yield "the config names a KV cache that is not understood"
    for name in reading.kept:
        module = nearest(name.rpartition(".")[0], model.linears)
        if module is not None and name not in dropped and name.removeprefix(f"{module}.") not in _BESIDE_A_WEIGHT:
            yield f"'{name}' belongs to a quantized weight, and what it does to it is not understood"
            break
    if not model.linears:
        yield "no tensor is of a quantized format that is known"
        return
    try:
        schemes = {name: linear.scheme for name, linear in model.linears.items()}
        DIALECTS[model.dialect].config_files({}, schemes, [], None)
    except CheckpointError as e:
        yield str(e)


def _quantization(reading: Reading) -> Mapping[str, Any]:
    return _table(reading.folder.config.get("quantization_config"))


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
