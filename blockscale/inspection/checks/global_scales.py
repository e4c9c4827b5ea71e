"""Scales that stand alone: of whole weights, of inputs and of caches. Values, directions, and fused groups."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from blockscale.checkpoint.dialects.stored import StoredLinear, StoredModel
from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.groups import expert_set, fused_groups, group_name
from blockscale.checkpoint.header import TensorInfo
from blockscale.formats.spec import E2M1, Granularity
from blockscale.inspection.census import is_scalar

_MIN_NORMAL = 2.0**-126  # fp32: below it the reciprocal overflows, or is about to
# What a multiplier times its format's range says the largest magnitude was. Real weights lie far inside the first
# limit, and inputs, massive activations included, inside the second.
_MAX_WEIGHT, _MAX_INPUT = 1e3, 1e6
_MIN_REVERSED = 1e-12
# Inputs leave less room: the reciprocal of a usual scale can look like that of a massive activation. All of them tell
# more, and so does one among good ones.
_FEW = 8  # too few for a median to say what is usual
_ALL_INPUTS, _USUAL_INPUT = 3e4, 1e2
_ODD_INPUT, _ODD_RATIO, _NEAR_RATIO = 2e5, 1e3, 30.0
# A member's scale times its sibling's is 1, and neither is about 1 itself: they are each other's reciprocals.
_SAME, _FAR = 1.02, 4.0

WEIGHT, FP8_WEIGHT, INPUT = "global scale", "weight scale", "input scale"


@dataclass(frozen=True)
class GlobalScale:
    """One scale that stands alone.

    where         the linear, or the attention layer of a cache
    kind          "global scale", "weight scale" (FP8), "input scale", "key scale" or "value scale"
    stored        as it lies in the file
    multiplier    the same in this program's direction
    unscaled_max  what the format's largest code and block scale make of a multiplier of 1; None if nothing uses it
    tensor        its name
    """

    where: str
    kind: str
    stored: float
    multiplier: float
    unscaled_max: float | None
    tensor: str = ""

    @property
    def amax(self) -> float:
        """The largest magnitude that the scale was made for."""
        return self.multiplier * (self.unscaled_max or math.nan)

    @property
    def amax_if_reversed(self) -> float:
        return (self.unscaled_max or math.nan) / self.multiplier


Peak = Callable[[str], float | None]  # linear -> its largest block scale, where that may be read


def stored_scales(model: StoredModel) -> Iterator[TensorInfo]:
    """Every tensor that `global_scales` needs the value of."""
    for linear in model.linears.values():
        for info, _, _, _ in _parts(linear):
            yield info
    for pair in model.kv_tensors.values():
        yield from (info for info in pair if is_scalar(info))


def global_scales(model: StoredModel, values: Mapping[str, float]) -> list[GlobalScale]:
    """`values`: of `stored_scales`, by name."""
    found = []
    for linear in model.linears.values():
        for info, kind, is_divisor, limit in _parts(linear):
            stored = values[info.name]
            found.append(GlobalScale(linear.name, kind, stored, _multiplier(stored, is_divisor), limit, info.name))
    for attention, pair in model.kv_tensors.items():
        for info, kind in zip(pair, ("key scale", "value scale"), strict=True):
            if is_scalar(info):
                stored = values[info.name]
                found.append(GlobalScale(attention, kind, stored, stored, None, info.name))
    return found


def _parts(linear: StoredLinear) -> Iterator[tuple[TensorInfo, str, bool, float | None]]:
    """Tensor, kind, whether it is a divisor, unscaled_max. What is no scalar is another rule's."""
    weight, activation = linear.scheme.weight, linear.scheme.activation
    second = linear.tensors.get("global_scale")
    if second is not None and weight.has_global_scale and is_scalar(second):
        yield second, WEIGHT, linear.has_divisors, weight.unscaled_max
    only = linear.tensors.get("block_scale")
    if only is not None and weight.granularity is Granularity.TENSOR and is_scalar(only):
        yield only, FP8_WEIGHT, False, weight.element.max
    inputs = linear.tensors.get("input_global_scale")
    if inputs is not None and is_scalar(inputs):
        is_divisor = linear.has_divisors and activation is not None and activation.has_global_scale
        limit = None if activation is None else activation.unscaled_max or activation.element.max
        yield inputs, INPUT, is_divisor, limit


def _multiplier(stored: float, is_divisor: bool) -> float:
    if not is_divisor:
        return stored
    return 1 / stored if stored else math.inf


# ---------------------------------------------------------------- one by one


def value_faults(scales: Sequence[GlobalScale]) -> Iterator[Fault]:
    """BS107 and BS108."""
    bad: dict[tuple[str, str], list[GlobalScale]] = {}
    for scale in scales:
        rule = _broken_rule(scale)
        if rule:
            bad.setdefault((rule, scale.where), []).append(scale)
    for (rule, where), members in bad.items():
        what = " and ".join(f"{member.kind} {member.stored:.4g}" for member in members)
        if rule == "bad-global-scale":
            hint = "the layer was exported without calibration or is damaged; quantize it again"
            yield Fault(rule, where, f"{where}: {what} is not a positive finite number", hint)
        else:
            hint = "a scale this far out comes from values that calibration never saw; calibrate again"
            yield Fault(rule, where, f"{where}: {what} or its reciprocal lies outside of fp32's normal numbers", hint)


def _broken_rule(scale: GlobalScale) -> str | None:
    stored = scale.stored
    if not (math.isfinite(stored) and stored > 0):
        return "bad-global-scale"
    return "denormal-global-scale" if min(stored, 1 / stored) < _MIN_NORMAL else None


# ---------------------------------------------------------------- direction


def reversed_scales(scales: Sequence[GlobalScale], peak: Peak) -> dict[GlobalScale, str]:
    """Scales that are their own reciprocals, and how one can tell.

    A multiplier is amax / unscaled_max. Its reciprocal, read as a multiplier, speaks of a largest magnitude of
    unscaled_max^2 / amax: millions, which no weight has and inputs hardly.
    """
    usable = [scale for scale in scales if scale.unscaled_max and not _broken_rule(scale)]
    found = _by_sibling(usable)
    for scale in usable:
        if scale.kind == INPUT:
            continue
        if scale.amax > _MAX_WEIGHT and _MIN_REVERSED < scale.amax_if_reversed < _MAX_WEIGHT:
            largest = peak(scale.where)
            # a scheme of one level may use a small part of the block scales' range
            if largest is None or E2M1.max * largest * scale.multiplier > _MAX_WEIGHT:
                found.setdefault(scale, _meaning(scale, "weights"))
    for unscaled_max in dict.fromkeys(scale.unscaled_max for scale in usable):
        alike = [scale for scale in usable if scale.kind == INPUT and scale.unscaled_max == unscaled_max]
        found = _by_inputs(alike) | found
    return found


def _by_sibling(scales: Sequence[GlobalScale]) -> dict[GlobalScale, str]:
    """Members of a fused group of which one has the other's reciprocal."""
    found = {}
    for kind in (WEIGHT, INPUT):
        by_linear = {scale.where: scale for scale in scales if scale.kind == kind}
        for members in fused_groups(by_linear).values():
            group = [by_linear[member] for member in members]
            for scale in group:
                if scale.amax < _FAR * scale.amax_if_reversed:
                    continue
                others = (other for other in group if other.unscaled_max == scale.unscaled_max)
                pair = next((o for o in others if 1 / _SAME < o.multiplier * scale.multiplier < _SAME), None)
                if pair is not None:
                    found[scale] = f"is the reciprocal of {_leaf(pair.where)}'s"
    return found


def _by_inputs(scales: Sequence[GlobalScale]) -> dict[GlobalScale, str]:
    """Input scales of one format: each by itself, all of them, and one among good ones."""
    amaxes = [scale.amax for scale in scales]
    is_many = len(amaxes) >= _FEW
    usual = statistics.median(amaxes) if is_many else min(amaxes if len(amaxes) > 2 else [0.0])
    found = {}
    for scale in scales:
        otherwise = scale.amax_if_reversed
        if scale.amax > _MAX_INPUT:
            is_reversed = _MIN_REVERSED < otherwise < _MAX_INPUT / 10
        elif usual > _ALL_INPUTS:
            is_reversed = scale.amax > _USUAL_INPUT
        else:
            is_reversed = _is_odd(scale, usual, is_many) and _is_near_others(otherwise, _same_input(scale, scales))
        if is_reversed:
            found[scale] = _meaning(scale, "inputs")
    return found


def _is_odd(scale: GlobalScale, usual: float, is_many: bool) -> bool:
    """Whether one scale among good ones would be as good as they are, were it its reciprocal."""
    is_odd = is_many and scale.amax > max(_ODD_INPUT, _ODD_RATIO * usual)
    return is_odd and scale.amax_if_reversed < _NEAR_RATIO * usual


def _same_input(scale: GlobalScale, scales: Sequence[GlobalScale]) -> list[GlobalScale]:
    """Others that see the same hidden states: of the fused group, and of the same projections of the layer's other
    experts. What comes out of an expert's or a layer's middle may be massive in one alone."""
    group = group_name(scale.where)
    if group == scale.where:
        return []
    experts, leaves = expert_set(group), group.rpartition(".")[2]
    return [
        other
        for other in scales
        if other.where != scale.where
        and (name := group_name(other.where)).rpartition(".")[2] == leaves
        and (name == group or (experts is not None and expert_set(name) == experts))
    ]


def _is_near_others(amax: float, others: Sequence[GlobalScale]) -> bool:
    return any(max(amax / other.amax, other.amax / amax) < _NEAR_RATIO for other in others)


def odd_faults(scales: Sequence[GlobalScale], backwards: Mapping[GlobalScale, str]) -> Iterator[Fault]:
    """BS118: input scales that might be reversed, or those of massive activations."""
    inputs = [s for s in scales if s.kind == INPUT and s.unscaled_max and not _broken_rule(s)]
    for unscaled_max in dict.fromkeys(scale.unscaled_max for scale in inputs):
        alike = [scale for scale in inputs if scale.unscaled_max == unscaled_max]
        usual = statistics.median(scale.amax for scale in alike)
        for scale in alike:
            if usual <= _ALL_INPUTS and _is_odd(scale, usual, len(alike) >= _FEW) and scale not in backwards:
                what = f"{scale.where}: {scale.kind} {scale.stored:.4g} {_meaning(scale, 'inputs')}"
                hint = "calibrate again to tell, or look at the layer's activations"
                yield Fault("odd-input-scale", scale.where, what, hint, is_fatal=False)


def _meaning(scale: GlobalScale, what: str) -> str:
    return f"would mean {what} of up to {scale.amax:.3g}, its reciprocal {scale.amax_if_reversed:.3g}"


def reversed_faults(found: Mapping[GlobalScale, str]) -> Iterator[Fault]:
    """BS109, one a layer."""
    by_layer: dict[str, list[GlobalScale]] = {}
    for scale in found:
        by_layer.setdefault(scale.where, []).append(scale)
    hint = "modelopt stores multipliers, compressed-tensors divisors: this one is the other dialect's"
    for where, scales in by_layer.items():
        texts = "; ".join(f"{scale.kind} {scale.stored:.4g} {found[scale]}" for scale in scales)
        tensors = tuple(scale.tensor for scale in scales)
        yield Fault("reversed-global-scale", where, f"{where}: {texts}", hint, is_fatal=False, tensors=tensors)


# ---------------------------------------------------------------- fused groups


def fused_faults(scales: Sequence[GlobalScale], left_out: frozenset[GlobalScale]) -> Iterator[Fault]:
    """BS101 and BS102. FP8 weights of a group keep scales of their own, and engines allow for that; `left_out` has
    faults of its own."""
    for kind, rule in ((WEIGHT, "fused-global-scale-mismatch"), (INPUT, "fused-input-scale-mismatch")):
        by_linear = {
            scale.where: scale
            for scale in scales
            if scale.kind == kind and scale.unscaled_max and scale not in left_out and not _broken_rule(scale)
        }
        for group, members in fused_groups(by_linear).items():
            by_format: dict[float | None, list[GlobalScale]] = {}
            for member in members:
                by_format.setdefault(by_linear[member].unscaled_max, []).append(by_linear[member])
            for alike in by_format.values():
                if len({scale.stored for scale in alike}) > 1:
                    yield _mismatch(rule, group, alike)


def _mismatch(rule: str, group: str, scales: Sequence[GlobalScale]) -> Fault:
    values = ", ".join(f"{_leaf(scale.where)} {scale.multiplier:.4g}" for scale in scales)
    multipliers = [scale.multiplier for scale in scales]
    ratio = max(multipliers) / min(multipliers)
    apart = f"{ratio:.3g} times apart" if ratio >= 1.001 else "apart in their last bits"
    return Fault(rule, group, f"{group}: {scales[0].kind}s of {values}: {apart}", is_fatal=False)


def _leaf(linear: str) -> str:
    return linear.rpartition(".")[2]
