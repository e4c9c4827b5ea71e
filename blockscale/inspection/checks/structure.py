"""Weights that engines run together and that do not belong together as they are stored, and parts that are missing."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from blockscale.checkpoint.dialects.stored import StoredModel
from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.groups import expert_set, fused_groups
from blockscale.checkpoint.structure import ROUTER, TOWER, num_experts
from blockscale.inspection.checks.files import pickle_faults, unwritten_faults
from blockscale.inspection.checks.layers import layer_faults
from blockscale.inspection.matrices import Matrix, matrices_of
from blockscale.inspection.reading import Reading

_MAX_NAMED = 5
# Tables of tokens and positions. A linear that works on embeddings may have the word in its name as well.
_EMBEDDING = re.compile(r"(?:.*\.)?(?:embed_tokens\w*|wte|wpe|(?:word|tok|token|position)_embeddings?|embed_in|shared)")
# Then what a shard lacks would be found missing everywhere.
_INCOMPLETE = (
    *("unreadable-file", "missing-shard", "ghost-index-entry", "unindexed-tensor", "unsafe-path", "malformed-json"),
    *("duplicate-tensor",),
)


def structure_faults(reading: Reading, matrices: Sequence[Matrix] | None = None) -> Iterator[Fault]:
    """BS103, BS113, BS115, BS119, BS208, BS210, BS315 to BS320 and BS404."""
    yield from pickle_faults(reading)
    yield from unwritten_faults(reading)
    yield from part_faults(reading, matrices_of(reading) if matrices is None else matrices)


def part_faults(reading: Reading, matrices: Sequence[Matrix]) -> Iterator[Fault]:
    """The same without what only the files' bytes or names show: BS208 and BS210."""
    if reading.model is not None:
        yield from _misplaced(matrices)
        yield from _global_shapes(reading)
        yield from _unread_inputs(reading.model)
        yield from _left_by_quantizers(reading)
        incomplete = list(_expert_faults(reading, matrices))
        if not _lacks_files(reading):
            yield from incomplete
        yield from _fused_faults(matrices, {fault.where for fault in incomplete})
    if not _lacks_files(reading):
        yield from layer_faults(reading, matrices)


def _lacks_files(reading: Reading) -> bool:
    return any(fault.is_fatal and fault.rule in _INCOMPLETE for fault in reading.folder.faults)


# ---------------------------------------------------------------- what runs together


def _fused_faults(matrices: Sequence[Matrix], reported: Collection[str]) -> Iterator[Fault]:
    by_module = {m.module: m for m in matrices}
    for name, members in fused_groups(by_module).items():
        schemes = {by_module[member].scheme for member in members}
        if len(schemes) > 1 and expert_set(name) not in reported:
            stored = ", ".join(f"{m.rpartition('.')[2]} {_format(by_module[m])}" for m in members)
            what = f"{name}: engines fuse these into one layer, and they are stored as {stored}"
            yield Fault("fused-formats-differ", name, what, "store all of them in one format", is_fatal=False)


def _format(matrix: Matrix) -> str:
    return "16-bit" if matrix.scheme is None else matrix.scheme.name


def _expert_faults(reading: Reading, matrices: Sequence[Matrix]) -> Iterator[Fault]:
    sets: dict[str, list[Matrix]] = {}
    for matrix in matrices:
        name = expert_set(matrix.module)
        if name is not None:
            sets.setdefault(name, []).append(matrix)
    claimed = num_experts(reading.folder.config)
    for name, members in sets.items():
        is_counted = type(claimed) is int and members[0].draft is None and members[0].reason != TOWER
        what = _mixture(name, members) or _missing_experts(name, members, claimed if is_counted else 0)
        if what is not None:
            yield Fault("experts-incomplete", name, what, "quantize all experts of a layer alike", is_fatal=False)


def _mixture(name: str, members: Sequence[Matrix]) -> str | None:
    if len({m.scheme for m in members}) < 2:
        return None
    by_format: dict[str, list[str]] = {}
    for member in members:
        by_format.setdefault(_format(member), []).append(member.module.removeprefix(f"{name}."))
    fewest = min(by_format, key=lambda fmt: len(by_format[fmt]))
    others = ", ".join(fmt for fmt in by_format if fmt != fewest)
    return f"{name}: {_some(by_format[fewest])} stored as {fewest}, the others as {others}"


def _missing_experts(name: str, members: Sequence[Matrix], claimed: int) -> str | None:
    """Experts that lack a projection which others have, or lack all of them. Of a stack there is nothing to count."""
    leaves: dict[int, set[str]] = {}
    for member in members:
        index, dot, leaf = member.module.removeprefix(f"{name}.").partition(".")
        if dot and index.isdecimal():
            leaves.setdefault(int(index), set()).add(leaf)
    if not leaves:
        return None
    every = set().union(*leaves.values())
    count = max(claimed, max(leaves) + 1)
    if len(leaves) == count and all(found == every for found in leaves.values()):
        return None
    lacking = {i: sorted(every - leaves.get(i, set())) for i in _first_lacking(leaves, every, count)}
    parts = [f"{i}" if len(lacks) == len(every) else f"{i} ({', '.join(lacks)})" for i, lacks in lacking.items()]
    num_lacking = count - sum(found == every for found in leaves.values())
    more = f" and {num_lacking - len(parts)} more" if num_lacking > len(parts) else ""
    return f"{name}: of {count} experts, these have no usable weights: {', '.join(parts)}{more}"


def _first_lacking(leaves: Mapping[int, set[str]], every: set[str], count: int) -> list[int]:
    """No loop over `count`, which a config may make anything."""
    found: list[int] = []
    number = 0
    while number < count and len(found) < _MAX_NAMED:
        if leaves.get(number) != every:
            found.append(number)
        number += 1
    return found


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more + (" is" if len(names) == 1 else " are")


# ---------------------------------------------------------------- single linears


def _misplaced(matrices: Sequence[Matrix]) -> Iterator[Fault]:
    """What engines never build as quantized layers."""
    rules = {TOWER: "tower-quantized", ROUTER: "router-quantized"}
    for matrix in matrices:
        if matrix.scheme is not None and matrix.reason in rules:
            what = f"{matrix.module} is stored as {matrix.scheme.name}: {matrix.reason}"
            yield Fault(rules[matrix.reason], matrix.module, what, "keep it in 16 bits", is_fatal=False)
        elif matrix.scheme is not None and matrix.reason == "embedding" and _EMBEDDING.fullmatch(matrix.module):
            what = f"{matrix.module} is stored as {matrix.scheme.name}, and no engine builds a quantized embedding"
            yield Fault("quantized-embedding", matrix.module, what, "keep it in 16 bits", is_fatal=False)


def _unread_inputs(model: StoredModel) -> Iterator[Fault]:
    for linear in model.linears.values():
        info = linear.tensors.get("input_global_scale")
        if info is not None and not linear.scheme.needs_input_scale:
            what = f"{info.name} is there, and {linear.scheme.name} rounds no inputs with a stored scale"
            yield Fault("unread-input-scale", linear.name, what, "leave it out", is_fatal=False)


def _left_by_quantizers(reading: Reading) -> Iterator[Fault]:
    """What a calibration kept for itself: `X.weight_quantizer._amax`."""
    for name in reading.kept:
        module, found, _ = name.partition("_quantizer._amax")
        if found:
            what = f"{name} is a quantizer's own tensor, and no engine expects it"
            yield Fault("loose-scale", module.rpartition(".")[0], what, "leave it out", is_fatal=False)


def _global_shapes(reading: Reading) -> Iterator[Fault]:
    """NVFP4's second level: no dimension in modelopt, one of size 1 in compressed-tensors."""
    model = reading.model
    assert model is not None
    want = (1,) if model.dialect == "compressed-tensors" else ()
    for linear in model.linears.values():
        if not linear.scheme.weight.has_global_scale or linear.is_transposed:
            continue
        for role in ("global_scale", "input_global_scale"):
            info = linear.tensors.get(role)
            if info is not None and info.shape != want and all(n == 1 for n in info.shape):
                what = f"{info.name} has the shape {list(info.shape)}, {model.dialect} has {list(want)} here"
                yield Fault("wrong-global-shape", linear.name, what, "reshape it", is_fatal=False)
