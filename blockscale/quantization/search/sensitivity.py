"""What each option of each group costs in accuracy, in nats of KL divergence.

    gradient    s(g, o) = 1/(2n) sum over n tokens of || dL/dy * (y_o - y) ||^2, summed over the group's linears

L is the loss on tokens that the model itself draws, so that the sum is the diagonal of the Fisher information applied
to the change of y: to second order, the KL divergence without what errors of different outputs do together. One pass
back a batch gives it for all groups. (Model Optimizer's AutoQuantize has the same form, with the text's own tokens.)

    kl          KL(16-bit || only g in o), measured: one pass a group and option
    calibrated  gradient, times r(kind, o): measured over gradient of a few groups of each kind

Scores add up to S, but losses add up to less: a model that is far off already loses less by one error more. What is
predicted is S / (1 + cS), where c follows from what the whole model loses in the recipe's own format; the scores of
every other option are scaled by b(o), so that the whole model in it is predicted as it was measured.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.errors import ModelError
from blockscale.quantization.search.divergence import Measure, batch_size
from blockscale.quantization.search.groups import KEPT, KV_GROUP, Group
from blockscale.quantization.search.subject import Subject

METHODS = ("calibrated", "gradient", "kl")
PROBES = 12  # groups whose divergence is measured alone, for each option
_PROBES_A_KIND = 3
_SEED = 0
_HOPELESS = 20.0

Progress = Callable[[str, int, int], None]
Scores = dict[tuple[str, str], float]  # (group, option) -> nats


@dataclass(frozen=True)
class Sensitivity:
    """scores      nats by group and option, 0 in 16 bits
    saturation  c, 1/nats: what scores of S together lose is S / (1 + cS)
    singles     measured with one group alone
    whole       measured with every group in an option that has it; `scale`: b(o)
    """

    method: str
    scores: Mapping[str, Mapping[str, float]]
    saturation: float
    singles: Mapping[str, Mapping[str, float]]
    whole: Mapping[str, float]
    scale: Mapping[str, float]
    num_gradient_tokens: int
    num_measured_tokens: int

    def predicted(self, score: float) -> float:
        """The divergence of picks whose scores sum to this."""
        return score / (1 + self.saturation * score)

    def score_of(self, kl: float) -> float:
        """The sum of scores at which a divergence is predicted; infinite if none is so bad."""
        return _score_of(kl, self.saturation)

    def table(self, groups: Sequence[Group]) -> list[list[float]]:
        """A row of scores for each group, in the order of its options."""
        return [[self.scores[group.name][option.name] for option in group.options] for group in groups]


def gradient_scores(subject: Subject, windows: Tensor, progress: Progress | None = None) -> Scores:
    """s(g, o) of every group that the windows [W, T] reach."""
    found: Scores = {}
    generator = torch.Generator(subject.device).manual_seed(_SEED)
    batches = windows.split(batch_size(subject, windows))
    for done, ids in enumerate(batches, 1):
        logits = subject.logits_with_gradients(ids, found)[:, :-1].flatten(0, 1)
        with torch.no_grad():
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
        loss = torch.nn.functional.cross_entropy(logits, drawn, reduction="sum")
        torch.autograd.backward(loss)
        if progress:
            progress("scoring", done, len(batches))
    num_tokens = windows.shape[0] * (windows.shape[1] - 1)
    if not all(math.isfinite(score) for score in found.values()):
        raise ModelError("gradients hold NaN or Inf on the calibration text", hint="try --sensitivity kl")
    return {key: score / (2 * num_tokens) for key, score in found.items()}


def find_sensitivity(
    subject: Subject,
    groups: Sequence[Group],
    windows: Tensor,
    measure: Measure,
    method: str = "calibrated",
    progress: Progress | None = None,
) -> Sensitivity:
    """`windows`: for gradients; `measure` has its own."""
    linears = [group for group in groups if group.name != KV_GROUP]
    options = list(dict.fromkeys(o.name for g in linears for o in g.options if o.name != KEPT))
    gradient = {} if method == "kl" else gradient_scores(subject, windows, progress)
    subject.switch.scores = None
    # experts that no token reached, for one, change nothing that was seen
    raw = {(g.name, o.name): gradient.get((g.name, o.name), 0.0) for g in linears for o in g.options if o.name != KEPT}
    probes = _probes(linears, options, raw, method)
    singles: Scores = {}
    for done, (name, option) in enumerate(probes, 1):
        singles[name, option] = measure.kl({name: option})
        if progress:
            progress("measuring", done, len(probes))
    scores = raw if method == "gradient" else dict(singles) if method == "kl" else _calibrated(linears, raw, singles)
    whole, sums = {}, {}
    for option in options:
        chosen = {group.name: option for group in linears if any(o.name == option for o in group.options)}
        sums[option] = math.fsum(scores[name, option] for name in chosen)
        whole[option] = measure.kl(chosen)
    is_scaled = method != "gradient"
    saturation = _saturation(sums, whole) if is_scaled else 0.0
    scale = {o: _score_of(whole[o], saturation) / sums[o] if is_scaled and sums[o] > 0 else 1.0 for o in options}
    table = {
        g.name: {o.name: 0.0 if o.name == KEPT else scores[g.name, o.name] * scale[o.name] for o in g.options}
        for g in linears
    }
    for cache in (group for group in groups if group.name == KV_GROUP):
        kl = {o.name: 0.0 if o.name == KEPT else measure.kl({KV_GROUP: o.name}) for o in cache.options}
        # a cache that loses more than all weights do has no finite score: what has one is bad enough
        table[KV_GROUP] = {name: min(_score_of(value, saturation), _HOPELESS * value) for name, value in kl.items()}
    return Sensitivity(
        method,
        table,
        saturation,
        _nested(singles),
        whole,
        scale,
        0 if method == "kl" else windows.shape[0] * (windows.shape[1] - 1),
        measure.num_tokens,
    )


def _saturation(sums: Mapping[str, float], whole: Mapping[str, float]) -> float:
    """c of the option that loses most; 0 where losses add up to more than their sum, for which scores are scaled."""
    worst = max(whole, key=whole.__getitem__)
    if not 0 < whole[worst] < sums[worst]:
        return 0.0
    return 1 / whole[worst] - 1 / sums[worst]


def _score_of(kl: float, saturation: float) -> float:
    """The inverse of S / (1 + cS)."""
    return math.inf if saturation * kl >= 1 else kl / (1 - saturation * kl)


def _probes(groups: Sequence[Group], options: Sequence[str], raw: Scores, method: str) -> list[tuple[str, str]]:
    """What is measured alone: everything, nothing, or of each kind a few from its least to its most sensitive."""
    if method == "gradient":
        return []
    found = []
    for option in options:
        having = [group for group in groups if any(o.name == option for o in group.options)]
        if method == "kl":
            found += [(group.name, option) for group in having]
            continue
        kinds: dict[str, list[str]] = {}
        for group in sorted(having, key=lambda group: raw[group.name, option]):
            kinds.setdefault(group.kind, []).append(group.name)
        most = min(_PROBES_A_KIND, max(1, PROBES // len(kinds))) if kinds else 0
        # the kinds that matter most, where there are more than probes
        ranked = sorted(kinds, key=lambda kind: -sum(raw[name, option] for name in kinds[kind]))[:PROBES]
        for kind in ranked:
            names, count = kinds[kind], min(most, len(kinds[kind]))
            found += [(names[(2 * i + 1) * len(names) // (2 * count)], option) for i in range(count)]
    return found


def _calibrated(groups: Sequence[Group], raw: Scores, singles: Scores) -> Scores:
    """Gradient scores times what the measured ones of their kind (else of their option) say."""
    kinds = {group.name: group.kind for group in groups}
    sums: dict[tuple[str, str], list[float]] = {}
    for (name, option), kl in singles.items():
        for key in ((kinds[name], option), ("", option)):
            pair = sums.setdefault(key, [0.0, 0.0])
            pair[0] += kl
            pair[1] += raw[name, option]
    ratios = {key: kl / score for key, (kl, score) in sums.items() if score > 0}

    def ratio(name: str, option: str) -> float:
        return ratios.get((kinds[name], option), ratios.get(("", option), 1.0))

    return {(name, option): score * ratio(name, option) for (name, option), score in raw.items()}


def _nested(scores: Scores) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for (name, option), score in scores.items():
        found.setdefault(name, {})[option] = score
    return found
