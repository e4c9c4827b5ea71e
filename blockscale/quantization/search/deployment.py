"""What the planner predicts for a mixture: time between tokens, or joules a token, on a GPU.

Costs have to be linear in the integer program. The predictor is not quite (reading and arithmetic overlap; a part in
several formats counts under the one that most of its bytes have), so its differences serve as coefficients - a part
whole in an option, all else at its least, shared out by parameters - and the limit on their sum is then moved, by
bisection, until the predictor itself stays below what was asked for.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from blockscale.checkpoint.source import Source
from blockscale.checkpoint.structure import module_name
from blockscale.errors import UsageError
from blockscale.planning.answer.choice import default_layout
from blockscale.planning.hardware.catalogue import Gpu, find_gpu
from blockscale.planning.models.architecture import Architecture, Part
from blockscale.planning.models.folder import part_of, planned_activation, planned_format
from blockscale.planning.models.model import architecture_of
from blockscale.planning.models.weights import PartWeights, Weights
from blockscale.planning.money.assumptions import Assumptions, load_assumptions
from blockscale.planning.money.bill import bill
from blockscale.planning.speed.layout import Layout
from blockscale.planning.speed.predict import Workload, predict
from blockscale.planning.speed.roofline import Deployment
from blockscale.quantization.plan import Plan
from blockscale.quantization.recipe import rule_scheme
from blockscale.quantization.search.budget import Budget
from blockscale.quantization.search.groups import KEPT, KV_GROUP, Group, Option
from blockscale.quantization.search.solve import Table, cheapest

_CONTEXT = 2048
_ENDLESS_BYTES = 10**15
_BF16 = ("bf16", None)
Sizes = Mapping[tuple[str, str | None], int]  # bytes by format of weights and of activations


@dataclass(frozen=True)
class Site:
    """Where a mixture would run. `fixed`: bytes that no group decides about, by part; `parts`: of each group."""

    architecture: Architecture
    gpu: Gpu
    layout: Layout
    workload: Workload
    assumptions: Assumptions
    fixed: Mapping[Part, int]
    parts: Mapping[str, Part]
    is_energy: bool

    def figure(self, groups: Sequence[Group], picks: Sequence[int]) -> float:
        """Milliseconds between tokens, or joules an output token at the wall; infinite where it does not fit."""
        return self._figure(self.gpu, groups, picks)

    def _figure(self, gpu: Gpu, groups: Sequence[Group], picks: Sequence[int]) -> float:
        options = [(group, group.options[pick]) for group, pick in zip(groups, picks, strict=True)]
        cache = next((o.name for g, o in options if g.name == KV_GROUP and o.name != KEPT), "bf16")
        d = Deployment(self.architecture, self._weights(options), gpu, self.layout, cache)
        try:
            prediction = predict(d, self.workload)
        except UsageError:
            return math.inf
        if not self.is_energy:
            return 1e3 * prediction.itl_s.value
        joules = bill(d, prediction, self.assumptions).joules_per_output_token
        assert joules is not None  # its power is known: see `find_site`
        return joules.value

    def _weights(self, options: Sequence[tuple[Group, Option]]) -> Weights:
        sizes: dict[Part, dict[tuple[str, str | None], int]] = {p: {_BF16: n} for p, n in self.fixed.items()}
        for group, option in options:
            if option.rule is None:
                continue
            key = _BF16 if option.name == KEPT else _planned(option)
            own = sizes.setdefault(self.parts[group.name], {})
            own[key] = own.get(key, 0) + option.num_bytes
        parts = {}
        for part, formats in sizes.items():
            fmt, activation = max(formats, key=lambda key: formats[key])
            parts[part] = PartWeights(fmt, activation, sum(formats.values()))
        return Weights(parts, is_exact=True)

    def costs(self, groups: Sequence[Group]) -> tuple[Table, float]:
        """Coefficients above the cheapest mixture, and what that one costs by the predictor, as if memory were
        endless."""
        roomy = replace(self.gpu, memory_bytes=_ENDLESS_BYTES)
        sizes = [[float(option.num_bytes) for option in group.options] for group in groups]
        least = cheapest(sizes, sizes)
        base = self._figure(roomy, groups, least)
        table = [[0.0] * len(group.options) for group in groups]
        for members in self._by_part(groups).values():
            for name in dict.fromkeys(option.name for i in members for option in groups[i].options):
                picks, moved = list(least), []
                for i in members:
                    names = [option.name for option in groups[i].options]
                    if name in names and names.index(name) != least[i]:
                        picks[i] = names.index(name)
                        moved.append(i)
                rise = self._figure(roomy, groups, picks) - base if moved else 0.0
                whole = sum(max(1, groups[i].num_parameters) for i in moved)
                for i in moved:
                    table[i][picks[i]] = rise * max(1, groups[i].num_parameters) / whole
        return table, base

    def _by_part(self, groups: Sequence[Group]) -> dict[object, list[int]]:
        found: dict[object, list[int]] = {}
        for i, group in enumerate(groups):
            found.setdefault(self.parts.get(group.name, KV_GROUP), []).append(i)
        return found


def _planned(option: Option) -> tuple[str, str | None]:
    assert option.rule is not None
    scheme = rule_scheme(option.rule)
    return planned_format(scheme.weight.name), planned_activation(scheme.activation.name if scheme.activation else None)


def find_site(source: Source, plan: Plan, groups: Sequence[Group], budget: Budget) -> Site:
    """UsageError for a GPU that is not known, or whose power is not where energy is asked for."""
    assert budget.gpu is not None
    gpu = find_gpu(budget.gpu)
    if budget.joules is not None and gpu.tdp_watts is None:
        raise UsageError(f"the power of {gpu.name} is not known", hint="describe it in a .toml file: --gpu FILE.toml")
    architecture = architecture_of(source.config, source.path.name)
    context = budget.context or min(_CONTEXT, architecture.context or _CONTEXT)
    parts = {
        group.name: part_of(group.members[0], plan.linears[group.members[0]].shape, source.config)
        for group in groups
        if group.members
    }
    decided = {member for group in groups for member in group.members}
    fixed: dict[Part, int] = {}
    for tensor in source.tensors.values():
        module = module_name(tensor.name)
        if module not in decided:
            is_matrix = len(tensor.shape) > 1
            part = part_of(module, tensor.shape, source.config) if is_matrix else Part.NORM
            fixed[part] = fixed.get(part, 0) + tensor.dtype.itemsize * math.prod(tensor.shape)
    least = sum(fixed.values()) + sum(min(option.num_bytes for option in group.options) for group in groups)
    return Site(
        architecture,
        gpu,
        default_layout(architecture, gpu, budget.gpus, least),
        Workload(max(1, context // 2), max(1, context - context // 2), budget.concurrency),
        load_assumptions(),
        fixed,
        parts,
        budget.joules is not None,
    )
