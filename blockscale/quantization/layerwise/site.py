"""One site of a decoder layer quantized: its inputs in, its members' quantized linears out. Nothing else is looked at.

x~ of the quantized model --round--> q(x~) --moments--> candidates by fused group --held-back error--> choice
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.algorithms.fake_quantize import round_activation
from blockscale.algorithms.residual_channels import choose_channels, residual_energy
from blockscale.algorithms.statistics import Moments, add_moments, finish, new_moments
from blockscale.checkpoint.groups import fused_groups
from blockscale.checkpoint.linear import LowRank, QuantizedLinear, Scheme
from blockscale.formats.spec import NVFP4
from blockscale.formats.tensor import QuantizedTensor
from blockscale.quantization.layerwise.branches import (
    given_by,
    has_branches,
    low_rank,
    num_residual_channels,
    residual,
)
from blockscale.quantization.layerwise.capture import SiteInputs
from blockscale.quantization.layerwise.method import Method
from blockscale.quantization.layerwise.rounding import Choice, Judge, Rounded, choose, split_rows
from blockscale.quantization.plan import PlannedLinear
from blockscale.quantization.units import input_scale
from blockscale.quantization.weight import ScaleMethod, quantize_weight, stored_global_scale

_FIRST_BATCHES = 2  # residual channels are chosen on the tokens of these


@dataclass(frozen=True)
class SiteJob:
    """Everything that decides a site's result.

    linears    the members, by stored name, in the layer's order
    weights    fp32 [N, K] of each (a stack's experts one below the other), after folds
    inputs     of the quantized model, after folds
    reference  the same tokens' inputs in the 16-bit model, before folds; None where tokens do not correspond (experts)
    smoothing  [K] that folds divided the inputs by, or None
    pooled     moments over all experts of the stage, which stand in for tokens that an expert lacks, or None
    """

    linears: Mapping[str, PlannedLinear]
    weights: Mapping[str, Tensor]
    inputs: SiteInputs
    reference: SiteInputs | None
    smoothing: Tensor | None
    method: Method
    activation_scale: ActivationScale
    pooled: Moments | None = None


@dataclass(frozen=True)
class SiteResult:
    """`linears` and `choices` by member; `input_amax` of the site, or of its siblings if `num_tokens` is 0."""

    linears: Mapping[str, QuantizedLinear]
    choices: Mapping[str, Choice]
    input_amax: float | None
    num_tokens: int


class InputRounding:
    """The site's inputs as its linears of one scheme will see them, and what the residual channels (if any) add."""

    def __init__(self, job: SiteJob, scheme: Scheme, amax: float) -> None:
        self.format = scheme.activation
        self.method = job.activation_scale if self.format is NVFP4 else ActivationScale.AMAX
        self.scale: Tensor | None = None
        self.channels: Tensor | None = None
        if scheme.needs_input_scale:
            assert self.format is not None
            self.scale = input_scale(amax, self.format, self.method)
        alike = [m for m, linear in job.linears.items() if linear.scheme == scheme and has_branches(linear)]
        if job.method.residual_channels and self.format is NVFP4 and alike:
            self.channels = self._choose(job, alike)

    def _choose(self, job: SiteJob, members: Sequence[str]) -> Tensor:
        rows = torch.cat([job.weights[m] for m in members])
        error = torch.zeros(rows.shape[1], device=rows.device)
        for x, _ in zip(job.inputs.train, range(_FIRST_BATCHES), strict=False):
            error += (x.float() - self.round(x)).square().sum(0)
        return choose_channels(residual_energy(error, rows), num_residual_channels(job.method, rows.shape[1]))

    def round(self, x: Tensor) -> Tensor:
        """[T, K] -> fp32, rounded once."""
        if self.format is None:
            return x.float()
        scale = None if self.scale is None else self.scale.to(x.device)
        values, factor = round_activation(x, self.format, scale, self.method)
        return values * factor

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> fp32, with what residual channels give back."""
        rounded = self.round(x)
        if self.channels is not None:
            error = x.float()[:, self.channels] - rounded[:, self.channels]
            rounded[:, self.channels] += self.round(error)
        return rounded


def quantize_site(job: SiteJob) -> SiteResult:
    """The site's members as they will be stored. The same job gives the same bytes."""
    amax = _input_amax(job)
    linears: dict[str, QuantizedLinear] = {}
    choices: dict[str, Choice] = {}
    groups: dict[Scheme, dict[str, tuple[str, ...]]] = {}
    for name, members in fused_groups(job.linears).items():
        groups.setdefault(job.linears[members[0]].scheme, {})[name] = members
    for scheme, alike in groups.items():
        rounding = InputRounding(job, scheme, amax or 0.0)
        if scheme.weight is NVFP4:
            _search(job, alike, rounding, linears, choices)
        else:
            for members in alike.values():
                linears |= _plain(job, members, rounding)
    return SiteResult(linears, choices, amax, job.inputs.train.num_tokens + job.inputs.held.num_tokens)


def _search(
    job: SiteJob,
    groups: Mapping[str, Sequence[str]],
    rounding: InputRounding,
    linears: dict[str, QuantizedLinear],
    choices: dict[str, Choice],
) -> None:
    """The best candidate for each of the site's groups that see their inputs alike, into `linears` and `choices`."""
    moments = collect(job, rounding)
    if job.pooled is not None:
        moments = _with_siblings(moments, job.pooled)
    held, reference = job.inputs.held_tokens(), None if job.reference is None else job.reference.held_tokens()
    held_seen = None if held is None else rounding(held)
    wanted = held if reference is None else _divided(reference, job.smoothing)
    for name, members in groups.items():
        weight = torch.cat([job.weights[m] for m in members])
        judge = None
        if held_seen is not None and wanted is not None:
            judge = Judge(held_seen, wanted.float() @ weight.T)
        low: dict[str, LowRank] = {}
        if job.method.rank and all(has_branches(job.linears[m]) for m in members):
            second = moments.second if moments.count else None
            found = {m: low_rank(job.weights[m], job.method, second, job.linears[m].tensor.dtype) for m in members}
            low = {m: branch for m, (branch, _) in found.items()}
            weight = torch.cat([rest for _, rest in found.values()])
            if judge is not None and held is not None:
                judge = Judge(judge.x, judge.target - given_by(list(low.values()), held))
        choice = choose(weight, moments, job.method, judge, name)
        parts = split_rows(choice.rounded, [len(job.weights[m]) for m in members])
        for member, part in zip(members, parts, strict=True):
            linears[member] = _linear(job, member, part, rounding, low.get(member))
            choices[member] = choice


def collect(job: SiteJob, rounding: InputRounding) -> Moments:
    """Of the training tokens as the linears will see them, with the 16-bit model's beside them where they are asked
    for."""
    weight = next(iter(job.weights.values()))
    sums = new_moments(weight.shape[1], weight.device)
    needs_cross = job.reference is not None and any(c.correction for c in job.method.candidates)
    others = iter(job.reference.train) if needs_cross and job.reference is not None else None
    for x in job.inputs.train:
        other = _divided(next(others), job.smoothing) if others is not None else None
        add_moments(sums, rounding(x), other, name=next(iter(job.linears)))
    return finish(sums)


def _divided(x: Tensor, smoothing: Tensor | None) -> Tensor:
    return x.float() if smoothing is None else x.float() / smoothing


def _input_amax(job: SiteJob) -> float | None:
    seen = [store.amax for store in (job.inputs.train, job.inputs.held) if store.amax is not None]
    if seen:
        return max(seen)
    return None if job.pooled is None else job.pooled.amax.amax().item()


def _with_siblings(own: Moments, pooled: Moments) -> Moments:
    """An expert's moments leaned on its siblings', as if each channel had brought a token more of theirs."""
    extra = own.second.shape[0]
    total = own.count + extra
    second = (own.second * own.count + pooled.second * extra) / total
    return replace(own, count=max(own.count, min(pooled.count, 1)), second=second)


def _plain(job: SiteJob, members: Sequence[str], rounding: InputRounding) -> dict[str, QuantizedLinear]:
    """Formats without a search: as they are stored anyway."""
    result = {}
    fmt = job.linears[members[0]].scheme.weight
    amax = torch.stack([job.weights[m].abs().amax() for m in members]).amax()
    shared = stored_global_scale(amax, ScaleMethod.AMAX, fmt) if fmt.has_global_scale else None
    for member in members:
        linear = job.linears[member]
        weight = job.weights[member].view(linear.shape)
        quantized, _ = quantize_weight(weight, fmt, ScaleMethod.AMAX, shared, member)
        result[member] = QuantizedLinear(linear.scheme, quantized, rounding.scale)
    return result


def _linear(
    job: SiteJob, member: str, part: Rounded, rounding: InputRounding, branch: LowRank | None
) -> QuantizedLinear:
    linear = job.linears[member]
    lead, k = linear.shape[:-1], linear.shape[-1]
    packed, block_scale = part.packed.view(*lead, k // 2), part.block_scale.view(*lead, k // NVFP4.block_size)
    weight = QuantizedTensor(NVFP4, packed, block_scale, part.global_scale, linear.shape, linear.tensor.dtype)
    again = None
    if rounding.channels is not None and has_branches(linear):
        again = residual(job.weights[member], rounding.channels, part.global_scale, linear.tensor.dtype)
    return QuantizedLinear(linear.scheme, weight, rounding.scale, low_rank=branch, residual=again)
