"""What the config files say, against each other and against the tensors."""

from collections.abc import Iterator, Mapping, Sequence

from blockscale.checkpoint.dialects import branches
from blockscale.checkpoint.dialects.modelopt import ALGORITHMS
from blockscale.checkpoint.dialects.stored import Claim, StoredModel
from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.linear import W4A4
from blockscale.checkpoint.structure import HEAD, NOT_RUN, nearest
from blockscale.inspection.checks.lists import effective_claims, list_faults, lists_differ
from blockscale.inspection.matrices import Matrix, is_tied, matrices_of
from blockscale.inspection.reading import Reading

_SVD, _SVDQUANT = "svdquant_lora_", "NVFP4_SVD"
_OF_KV_SCALES = ("one-sided-kv-scale", "kv-config-mismatch")  # scales that are there, and that nobody can read


def config_faults(reading: Reading, matrices: Sequence[Matrix] | None = None) -> Iterator[Fault]:
    """BS304 to BS314 and BS321; what else configs get wrong, reading has found already."""
    if reading.model is None or any(fault.rule == "no-quantization-config" for fault in reading.faults):
        return
    matrices = matrices_of(reading) if matrices is None else matrices
    yield from list_faults(reading, matrices)
    yield from _disagreements(reading, reading.model, matrices)
    yield from _mixed_faults(reading.model)
    yield from _more_than_codes(reading, reading.model)
    yield from _head_faults(reading, matrices)
    yield from _kv_faults(reading.model, matrices)


# ---------------------------------------------------------------- two files


def _disagreements(reading: Reading, model: StoredModel, matrices: Sequence[Matrix]) -> Iterator[Fault]:
    claims = effective_claims(model)
    if len(claims) < 2:
        return  # one leaves everything to the other
    first, second = claims[:2]

    def differ(what: str, one: object, other: object) -> Fault:
        message = f"{what}: {first.file} says {one or 'none'}, {second.file} says {other or 'none'}"
        return Fault("configs-disagree", second.file, message, "correct the one that is wrong", is_fatal=False)

    layer = lists_differ((first, second), matrices, reading)
    if str(first.algorithm).upper() != str(second.algorithm).upper():
        yield differ("the algorithm", first.algorithm, second.algorithm)
    elif first.kv_format != second.kv_format:
        yield differ("the KV cache", first.kv_format, second.kv_format)
    elif first.layers and second.layers and first.layers != second.layers:
        yield differ("quantized layers", *_first_difference(first.layers, second.layers))
    elif layer is not None:
        what = f"{first.file} and {second.file} list different modules to leave in 16 bits, first {layer}"
        yield Fault("configs-disagree", second.file, what, "correct the one that is wrong", is_fatal=False)


def _first_difference(first: Mapping[str, str], second: Mapping[str, str]) -> tuple[str, str]:
    name = next(name for name in [*first, *second] if first.get(name) != second.get(name))
    return f"{name} {first.get(name)}", f"{name} {second.get(name)}"


# ---------------------------------------------------------------- mixed formats


def _mixed_faults(model: StoredModel) -> Iterator[Fault]:
    for claim in model.claims:
        if claim.layers:
            yield from _entry_faults(model, claim, claim.layers)


def _entry_faults(model: StoredModel, claim: Claim, layers: Mapping[str, str]) -> Iterator[Fault]:
    used = set()
    for linear in model.linears.values():
        entry = nearest(linear.name, layers)
        if entry is None:
            continue  # reading has said so
        used.add(entry)
        claimed = ALGORITHMS.get(layers[entry])
        if claimed is not None and claimed.weight != linear.scheme.weight:
            what = f"{linear.name} is stored as {linear.scheme.weight.name}, {claim.file} says {layers[entry]}"
            yield Fault("mixed-layers-mismatch", linear.name, what, "correct the entry", is_fatal=False)
    for entry in layers:
        if entry not in used:
            what = f"{claim.file} says that {entry} is {layers[entry]}, and nothing of it is quantized"
            yield Fault("mixed-layers-mismatch", entry, what, "drop the entry", is_fatal=False)


# ---------------------------------------------------------------- more than codes and scales


def _more_than_codes(reading: Reading, model: StoredModel) -> Iterator[Fault]:
    """Tensors of SVDQuant and AWQ below a config that speaks of plain NVFP4."""
    if any(fault.rule == "unknown-algorithm" for fault in model.faults):
        return
    name = next((name for name in reading.kept if _SVD in name and nearest(name, model.linears)), None)
    if name is not None:
        what = f"'{name}' is part of a weight as SVDQuant stores it, and no config says so"
        yield Fault("format-mismatch", "config.json", what, "without it the weight is another; see NVFP4_SVD")
        return
    low_rank = [n for n, linear in model.linears.items() if branches.has_low_rank(linear.tensors)]
    other = next((c for c in model.claims if c.algorithm not in (None, _SVDQUANT, "MIXED_PRECISION")), None)
    if low_rank and other is not None:
        has = f"{len(low_rank)} weights have a low-rank branch, first {low_rank[0]}"
        what = f"{has}, and {other.file} says {other.algorithm}"
        hint = f"{_SVDQUANT} is what such weights are called"
        yield Fault("format-mismatch", "config.json", what, hint, is_fatal=False)
        return
    claim = next((c for c in model.claims if c.algorithm is not None and c.algorithm.upper() == "NVFP4"), None)
    scaled = [n for n, linear in model.linears.items() if "pre_quant_scale" in linear.tensors and linear.scheme == W4A4]
    if claim is not None and scaled:
        has = f"{len(scaled)} weights have a pre_quant_scale, first {scaled[0]}"
        what = f"{has}, and {claim.file} says {claim.algorithm}"
        yield Fault("format-mismatch", "config.json", what, "NVFP4_AWQ is what such weights are called", is_fatal=False)


# ---------------------------------------------------------------- output head


def _head_faults(reading: Reading, matrices: Sequence[Matrix]) -> Iterator[Fault]:
    for matrix in matrices:
        if matrix.scheme is None or matrix.reason != HEAD or matrix.draft is not None:
            continue
        if is_tied(reading.folder.config):
            what = f"{matrix.module} is stored as {matrix.scheme.name}, and tie_word_embeddings is true"
            yield Fault("quantized-tied-head", matrix.module, what, "set it to false", is_fatal=False)
        else:
            what = f"{matrix.module} is stored as {matrix.scheme.name}"
            hint = "keep the head in 16 bits unless the engine is known to load it"
            yield Fault("quantized-lm-head", matrix.module, what, hint, is_fatal=False)


# ---------------------------------------------------------------- KV cache


def _kv_faults(model: StoredModel, matrices: Sequence[Matrix]) -> Iterator[Fault]:
    def mismatch(where: str, what: str, hint: str) -> Fault:
        return Fault("kv-config-mismatch", where, what, hint, is_fatal=False)

    announced = next((claim.kv_format for claim in model.claims if claim.kv_format), None)
    scaled = model.kv_tensors
    if scaled and announced is None:
        what = f"{len(scaled)} attention layers have scales of a KV cache, and no config announces one"
        yield mismatch("config.json", what, "announce an FP8 cache, or leave the scales out")
    elif announced is not None and not scaled and not any(f.rule in _OF_KV_SCALES for f in model.faults):
        what = f"the config announces a KV cache of {announced}, and no attention layer has scales"
        hint = "calibrate the cache, or do not announce it"
        yield Fault("kv-scales-missing", "config.json", what, hint, is_fatal=False)
    elif scaled:
        attentions = _attentions(matrices)
        kinds = {attentions[name] for name in scaled if name in attentions}
        partly = {fault.where for fault in model.faults}
        for name, kind in attentions.items():
            if kind in kinds and name not in scaled and name not in partly:
                what = f"{name} has no scales of a KV cache, {len(scaled)} others have"
                yield mismatch(name, what, "calibrate this layer too")


def _attentions(matrices: Sequence[Matrix]) -> dict[str, frozenset[str]]:
    """Attention modules of the decoder, with the names of their projections: those of one kind have the same."""
    leaves: dict[str, set[str]] = {}
    for matrix in matrices:
        if matrix.draft is None and matrix.reason not in NOT_RUN:
            parent, _, leaf = matrix.module.rpartition(".")
            leaves.setdefault(parent, set()).add(leaf)
    return {parent: frozenset(found) for parent, found in leaves.items() if {"k_proj", "v_proj"} <= found}
