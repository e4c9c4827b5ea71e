"""What can be done about each finding of lint without losing anything, or why nothing can."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from blockscale.checkpoint.dialects import branches
from blockscale.checkpoint.dialects.modelopt import ALGORITHMS
from blockscale.checkpoint.dialects.stored import StoredLinear, role_faults
from blockscale.checkpoint.folder import HF_QUANT_CONFIG
from blockscale.checkpoint.groups import fused_groups, group_name
from blockscale.checkpoint.shards import INDEX_NAME
from blockscale.checkpoint.tensors import read_tensor
from blockscale.conversion.repair import fixes
from blockscale.conversion.repair.input_scales import ROLE, mend_input_scales
from blockscale.conversion.repair.reindex import MENDED
from blockscale.conversion.repair.treatment import NONE, Treatment, scale_role, scale_shape, with_input_scale
from blockscale.formats.spec import ScaleType
from blockscale.inspection.census import one_byte_scale, take_census
from blockscale.inspection.checks.scale_order import padded_shape
from blockscale.inspection.checks.scales import headroom
from blockscale.inspection.findings import Finding
from blockscale.inspection.reading import Reading

_DROPPED_LEAVES = ("weight_scale_2", "input_scale", "weight_global_scale", "input_global_scale", "_amax")
_NOTHING = "nothing in the files says what it should be"
NO_REPAIR = "has no repair"
# Of these the files might say it; of what is lost or of another model there is nothing to ask them for.
_OF_SCALES = ("nan-block-scale", "missing-block-scale", "missing-global-scale", "one-sided-kv-scale")
_UNKNOWN = "its tensors are no format that is known"
_OTHER_NUMBER = "its block scales are of another number than its weight's blocks"
_NO_SIBLING = "no sibling that sees the same input has a scale"
_GOES_ALONG = "residual channels go by the same scales, and nothing tells whether they have the same fault"
# What is mended by changing a weight's codes or scales.
_OF_WEIGHTS = (
    *("fused-global-scale-mismatch", "negative-block-scale", "bad-global-scale", "denormal-global-scale"),
    *("reversed-global-scale", "zero-weight-as-nan", "subnormal-block-scales", "swapped-nibbles", "swizzled-scales"),
)


@dataclass(frozen=True)
class Remedies:
    """treatments  of linears, by name
    shared      fused groups whose weights get one global scale
    dropped     names of tensors that are left out
    kv_format   of the cache, as the config shall announce it
    treated     findings that this mends
    refused     findings that nothing here mends, and why
    """

    treatments: Mapping[str, Treatment]
    shared: frozenset[str]
    dropped: frozenset[str]
    kv_format: str | None
    treated: tuple[Finding, ...]
    refused: tuple[tuple[Finding, str], ...]


@dataclass
class _Sheet:
    """What is being put together while findings are gone through."""

    reading: Reading
    groups: Mapping[str, tuple[str, ...]]
    zeros: frozenset[str]  # linears of zeros whose scales are NaN
    treatments: dict[str, Treatment] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)
    shared_inputs: set[str] = field(default_factory=set)
    reversed_inputs: set[str] = field(default_factory=set)
    missing_inputs: dict[str, list[Finding]] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    kv_format: str | None = None

    @property
    def linears(self) -> Mapping[str, StoredLinear]:
        return self.reading.model.linears if self.reading.model is not None else {}

    def treat(self, name: str, **changes: Any) -> None:
        self.treatments[name] = replace(self.treatments.get(name, NONE), **changes)


def find_remedies(reading: Reading, findings: Iterable[Finding]) -> Remedies:
    """`findings`: of lint about this reading. Reads single scales, and block scales where a finding is about them."""
    model = reading.model
    findings = list(findings)
    sheet = _Sheet(
        reading,
        fused_groups(model.linears) if model is not None else {},
        frozenset(finding.layer for finding in findings if finding.name == "zero-weight-as-nan"),
        kv_format=model.kv_format if model is not None else None,
    )
    treated, refused = [], []
    for finding in findings:
        reason = "" if _is_echo(sheet, finding) else _handle(sheet, finding)
        if reason:
            refused.append((finding, reason))
        else:
            treated.append(finding)
    helpless = _settle_inputs(sheet)
    refused += [(finding, _NO_SIBLING) for finding in treated if finding in helpless]
    treated = [finding for finding in treated if finding not in helpless]
    # a scale that was put right may differ from its siblings' in the last bit
    moved = {group_name(name) for name, treatment in sheet.treatments.items() if treatment.moves_global}
    sheet.shared |= {name for name in moved if len(sheet.groups[name]) > 1}
    return Remedies(
        sheet.treatments,
        frozenset(sheet.shared),
        frozenset(sheet.dropped),
        sheet.kv_format,
        tuple(treated),
        tuple(refused),
    )


def _handle(sheet: _Sheet, finding: Finding) -> str:
    if finding.name in _OF_WEIGHTS:
        fused = sheet.groups.get(finding.layer) or sheet.groups.get(group_name(finding.layer), ())
        if any(branches.has_residual(sheet.linears[member].tensors) for member in fused):
            return _GOES_ALONG
    return _HANDLERS.get(finding.name, _refuse)(sheet, finding)


def _is_echo(sheet: _Sheet, finding: Finding) -> bool:
    """Whether a linear only lacks what another format than its own would need: the config names a wrong one."""
    linear = sheet.linears.get(finding.layer)
    is_about_roles = finding.name in ("missing-block-scale", "missing-global-scale", "missing-input-scale")
    return is_about_roles and linear is not None and all(f.rule != finding.name for f in role_faults(linear))


def _settle_inputs(sheet: _Sheet) -> frozenset[Finding]:
    """Puts new input scales into the treatments; returns the findings about linears that no sibling can help."""
    if not (sheet.reversed_inputs or sheet.missing_inputs or sheet.shared_inputs):
        return frozenset()
    scales, helpless = mend_input_scales(
        sheet.linears,
        reversed_=sheet.reversed_inputs,
        missing=sheet.missing_inputs,
        shared=sheet.shared_inputs,
    )
    for name, scale in scales.items():
        linear = sheet.linears[name]
        sheet.treatments[name] = with_input_scale(sheet.treatments.get(name, NONE), scale.tensor, linear, scale.name)
    return frozenset(finding for name in helpless for finding in sheet.missing_inputs[name])


# ---------------------------------------------------------------- one finding: mended (""), or why not


Handler = Callable[[_Sheet, Finding], str]


def _refuse(sheet: _Sheet, finding: Finding) -> str:
    return _NOTHING if finding.name in _OF_SCALES else NO_REPAIR


def _by_rewriting(sheet: _Sheet, finding: Finding) -> str:
    """Index and configs are written anew in any case."""
    return ""


def _missing_shard(sheet: _Sheet, finding: Finding) -> str:
    return "" if sheet.reading.folder.tensors else NO_REPAIR


def _json(sheet: _Sheet, finding: Finding) -> str:
    return "" if finding.layer in (INDEX_NAME, HF_QUANT_CONFIG) else "what it said of the model is lost"


def _treat_linear(**changes: Any) -> Handler:
    def handle(sheet: _Sheet, finding: Finding) -> str:
        if finding.layer not in sheet.linears:
            return _UNKNOWN
        sheet.treat(finding.layer, **changes)
        return ""

    return handle


def _share_weights(sheet: _Sheet, finding: Finding) -> str:
    sheet.shared.add(finding.layer)
    return "" if finding.layer in sheet.groups else _NOTHING


def _share_inputs(sheet: _Sheet, finding: Finding) -> str:
    sheet.shared_inputs.add(finding.layer)
    return "" if finding.layer in sheet.groups else _NOTHING


def _missing_input(sheet: _Sheet, finding: Finding) -> str:
    if finding.layer not in sheet.linears:
        return _NOTHING
    sheet.missing_inputs.setdefault(finding.layer, []).append(finding)
    return ""


def _bad_scale(sheet: _Sheet, finding: Finding) -> str:
    """A weight's scale may have a sign; an input's may come from siblings."""
    linear = sheet.linears.get(finding.layer)
    if linear is None:
        return _NOTHING
    is_mended = False
    for role in (scale_role(linear), ROLE):
        info = linear.tensors.get(role) if role is not None else None
        if info is None or fixes.is_usable(read_tensor(info)) or (role != ROLE and linear.name in sheet.zeros):
            continue
        if role == ROLE and not linear.scheme.needs_input_scale:
            sheet.dropped.add(info.name)
        elif role == ROLE:
            sheet.missing_inputs.setdefault(linear.name, []).append(finding)
        elif fixes.is_usable(-read_tensor(info).float()):
            sheet.treat(linear.name, has_signed_global=True)
        else:
            return _NOTHING
        is_mended = True
    return "" if is_mended else _NOTHING


def _reversed(sheet: _Sheet, finding: Finding) -> str:
    linear = sheet.linears.get(finding.layer)
    if linear is None:
        return _NOTHING
    of_input = linear.tensors.get(ROLE)
    for tensor in finding.tensors:
        if of_input is not None and tensor == of_input.name:
            sheet.reversed_inputs.add(linear.name)
        else:
            sheet.treat(linear.name, has_reversed_global=True)
    return ""


def _subnormal(sheet: _Sheet, finding: Finding) -> str:
    """Members of a group move together: the one with the largest block scale says how far."""
    linear = sheet.linears.get(finding.layer)
    if linear is None:
        return _NOTHING
    members = [sheet.linears[name] for name in sheet.groups[group_name(linear.name)]]
    scales = [m.tensors["block_scale"] for m in members if m.scheme.weight == linear.scheme.weight]
    if any(headroom(take_census(info, ScaleType.E4M3)) < 2 for info in scales):
        return "the largest block scale leaves no room: the others are small because it is large"
    sheet.treat(linear.name, fills_range=True)
    return ""


def _loose(sheet: _Sheet, finding: Finding) -> str:
    """Scalars and statistics that nothing uses; block scales are half of a weight that is lost."""
    below = [info for name, info in sheet.reading.kept.items() if name.startswith(f"{finding.layer}.")]
    loose = [info for info in below if info.name.endswith(_DROPPED_LEAVES)]
    lost = [info for info in below if info.name.endswith(("weight_scale", "pre_quant_scale"))]
    if lost or not loose:
        return "what it is the scale of is lost"
    sheet.dropped.update(info.name for info in loose)
    return ""


def _unread_input(sheet: _Sheet, finding: Finding) -> str:
    linear = sheet.linears.get(finding.layer)
    if linear is None:
        return _NOTHING
    sheet.dropped.add(linear.tensors[ROLE].name)
    return ""


def _format(sheet: _Sheet, finding: Finding) -> str:
    """Tensors that are a format of their own need another config; padded scales are cut."""
    linear = sheet.linears.get(finding.layer)
    if linear is None:
        return "" if finding.layer == "config.json" else _UNKNOWN
    if any(fault.rule == "format-mismatch" for fault in role_faults(linear)):
        return _padding(sheet, linear)
    if _is_odd_one(sheet, linear):
        return "its input scale may be meant for its own format or for the config's"
    return ""


def _is_odd_one(sheet: _Sheet, linear: StoredLinear) -> bool:
    """Whether a linear with an input scale is not in the one format that the config names, and others are. Where none
    is, it is the config that is wrong."""
    model = sheet.reading.model
    claimed = ALGORITHMS.get(str(model.claims[0].algorithm)) if model is not None and model.claims else None
    if claimed is None or not linear.scheme.needs_input_scale or linear.scheme.activation == claimed.activation:
        return False
    return any(other.scheme.weight == claimed.weight for other in sheet.linears.values())


def _swizzled(sheet: _Sheet, finding: Finding) -> str:
    linear = sheet.linears.get(finding.layer)
    if linear is None or linear.is_transposed:
        return _UNKNOWN
    if linear.tensors["block_scale"].shape != scale_shape(linear):
        return _padding(sheet, linear)
    sheet.treat(linear.name, is_swizzled=True)
    return ""


def _padding(sheet: _Sheet, linear: StoredLinear) -> str:
    """Block scales of a padded weight: where the padding's zeros lie tells in which order."""
    info, fmt = linear.tensors.get("block_scale"), linear.scheme.weight
    packed = linear.tensors["packed"]
    is_known = info is not None and one_byte_scale(info, fmt.scale) and packed.dtype == "U8" and len(packed.shape) == 2
    if info is None or not is_known or linear.shape[-1] % fmt.block_size:
        return _UNKNOWN
    rows, cols = scale_shape(linear)
    scale = read_tensor(info)
    in_rows = (
        scale.dim() == 2
        and scale.shape[0] >= rows
        and scale.shape[1] >= cols
        and fixes.has_zero_padding(scale, rows, cols)
    )
    is_swizzled = info.num_bytes == math.prod(padded_shape(rows, cols)) and fixes.has_swizzled_zero_padding(
        scale, rows, cols
    )
    if in_rows == is_swizzled:
        return "the padding of its block scales does not tell their order" if in_rows else _OTHER_NUMBER
    sheet.treat(linear.name, is_padded=in_rows, is_swizzled=is_swizzled)
    return ""


def _kv_config(sheet: _Sheet, finding: Finding) -> str:
    """Scales that no config announces are an FP8 cache's: both formats store amax / 448, and FP8 is finer."""
    model = sheet.reading.model
    if model is None or not model.kv_tensors or model.kv_format is not None:
        return _NOTHING
    sheet.kv_format = "fp8"
    return ""


_HANDLERS: Mapping[str, Handler] = {
    **dict.fromkeys(MENDED, _by_rewriting),
    "missing-shard": _missing_shard,
    "fused-global-scale-mismatch": _share_weights,
    "fused-input-scale-mismatch": _share_inputs,
    "negative-block-scale": _treat_linear(has_signed_blocks=True),
    "bad-global-scale": _bad_scale,
    "denormal-global-scale": _bad_scale,
    "reversed-global-scale": _reversed,
    "missing-input-scale": _missing_input,
    "loose-scale": _loose,
    "unread-input-scale": _unread_input,
    "zero-weight-as-nan": _treat_linear(is_zero_as_nan=True),
    "subnormal-block-scales": _subnormal,
    "malformed-json": _json,
    "pickle-weights": _by_rewriting,
    "no-quantization-config": _by_rewriting,
    "unknown-algorithm": _by_rewriting,
    "excluded-but-quantized": _by_rewriting,
    "kept-but-not-excluded": _by_rewriting,
    "exclude-matches-nothing": _by_rewriting,
    "exclude-read-differently": _by_rewriting,
    "configs-disagree": _by_rewriting,
    "format-mismatch": _format,
    "mixed-layers-mismatch": _by_rewriting,
    "quantized-tied-head": _by_rewriting,
    "kv-config-mismatch": _kv_config,
    "draft-layer-format": _by_rewriting,
    "swapped-nibbles": _treat_linear(has_swapped_nibbles=True),
    "swizzled-scales": _swizzled,
    "wrong-global-shape": _treat_linear(has_wrong_shapes=True),
}
