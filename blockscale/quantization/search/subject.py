"""The 16-bit model that a search experiments on: every linear it decides about can run in any of its options.

Layers stand in the model as stand-ins that fetch them when they run. Where memory allows, a fetched layer stays; else
it is read from disk for each pass and dropped, so that one layer, the hidden states of a batch and its logits are all
that is held beside embedding and head. Going backward, each layer runs once more with gradients (checkpointing).
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as run_again

from blockscale.checkpoint.linear import QuantizedLinear
from blockscale.checkpoint.reader import Checkpoint, open_checkpoint
from blockscale.errors import RecipeError
from blockscale.host.attention import kv_rounding
from blockscale.host.linear import KeptLinear, PackedLinear
from blockscale.host.model import check_ids
from blockscale.host.skeleton import build_skeleton, decoder_layers, load_config
from blockscale.host.weights import HostedWeights, host_weights, materialize, materialized_copy, set_module
from blockscale.quantization.plan import Plan
from blockscale.quantization.recipe import KEEP, rule_scheme
from blockscale.quantization.search.choice_linear import ChoiceLinear, Pack, Switch
from blockscale.quantization.search.groups import KEPT, KV_GROUP, Group, Option
from blockscale.quantization.statistics import ActivationStatistics
from blockscale.quantization.units import input_scale, kv_scales
from blockscale.quantization.weight import ScaleMethod, quantize_weight, stored_global_scale

_RESIDENT_SHARE = 0.35  # 16-bit weights of free memory: packed options take about as much again


@dataclass(frozen=True)
class Subject:
    """`model`: transformers' own, whose linears look at `switch`."""

    model: Any
    switch: Switch
    device: torch.device
    is_resident: bool

    def logits(self, ids: Tensor, chosen: Mapping[str, str]) -> Tensor:
        """Token ids [B, T] -> fp32 [B, T, V], without gradients, under a choice."""
        with torch.no_grad():
            return self._run(ids, chosen)

    def logits_with_gradients(self, ids: Tensor, scores: dict[tuple[str, str], float]) -> Tensor:
        """In 16 bits; going backward from them adds to `scores`."""
        self.switch.scores = scores
        with torch.enable_grad():
            return self._run(ids, {})

    def _run(self, ids: Tensor, chosen: Mapping[str, str]) -> Tensor:
        self.switch.chosen = chosen
        logits: Tensor = self.model(input_ids=ids.to(self.device), use_cache=False).logits
        return logits.float()


def open_subject(
    path: Path,
    plan: Plan,
    groups: Sequence[Group],
    statistics: ActivationStatistics,
    windows: Tensor,
    device: str = "cpu",
) -> Subject:
    """Hosts a model folder for a search over `groups`, whose linears are `plan`'s. `windows`: token ids that will run.

    ModelError for an architecture that transformers lacks.
    """
    checkpoint = open_checkpoint(path)
    dtype = torch.float32 if device == "cpu" else checkpoint.dtype
    cache = next((group for group in groups if group.name == KV_GROUP), None)
    # one without weights, from which layers are copied, and one that runs
    skeleton = build_skeleton(load_config(path), dtype, with_kv_transforms=cache is not None)
    model: Any = build_skeleton(load_config(path), dtype, with_kv_transforms=cache is not None)
    weights = host_weights(skeleton, checkpoint, is_emulating=False)
    prefix, layers = decoder_layers(model)
    check_ids(windows, model)
    switch = Switch()
    prepare = partial(_prepare, weights, _Packer(plan, statistics), groups, statistics, switch)
    is_resident = _fits(checkpoint, device)

    def load(index: int) -> nn.Module:
        name = f"{prefix}.{index}"
        layer = materialized_copy(skeleton, weights, name).to(device)
        prepare(layer, f"{name}.")
        return layer

    parent, _, leaf = prefix.rpartition(".")
    stand_ins = [
        _StandIn(layer, _kept(partial(load, i)) if is_resident else partial(load, i)) for i, layer in enumerate(layers)
    ]
    setattr(model.get_submodule(parent), leaf, nn.ModuleList(stand_ins))
    materialize(model, weights, skip=prefix)
    model.tie_weights()
    model.to(device)
    prepare(model, "")
    return Subject(model, switch, torch.device(device), is_resident)


def _kept(load: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    loaded: list[nn.Module] = []

    def get() -> nn.Module:
        if not loaded:
            loaded.append(load())
        return loaded[0]

    return get


def _fits(checkpoint: Checkpoint, device: str) -> bool:
    if device == "cpu":
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        free, _ = torch.cuda.mem_get_info(device)
    return checkpoint.folder.num_bytes < _RESIDENT_SHARE * free


class _StandIn(nn.Module):
    """Stands for a decoder layer, which it fetches to run."""

    def __init__(self, layer: nn.Module, fetch: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.fetch = fetch
        # models look at attributes of their layers, such as the kind of attention
        for name, value in vars(layer).items():
            if not name.startswith("_") and not hasattr(self, name):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.fetch()(hidden_states, *args, **kwargs)
        if not hidden_states.requires_grad:  # the first: weights are frozen, so nothing before it has gradients
            hidden_states = hidden_states.detach().requires_grad_()

        def run(hidden: Tensor) -> Any:
            return self.fetch()(hidden, *args, **kwargs)

        return run_again(run, hidden_states, use_reentrant=True)


class _Packer:
    """Quantizes a hosted weight as the pipeline would."""

    def __init__(self, plan: Plan, statistics: ActivationStatistics) -> None:
        self._fused = {member: members for members in plan.groups.values() for member in members}
        self._input_amax = statistics.input_amax

    def pack(self, option: Option, amax: Callable[[str], Tensor], kept: KeptLinear) -> PackedLinear:
        """`amax`: of a module's weight; those that share a scale lie in one layer."""
        assert option.rule is not None
        scheme, method = rule_scheme(option.rule), ScaleMethod(option.rule.scale)
        members = self._fused[kept.name]
        shared = None
        if scheme.weight.has_global_scale:
            largest = torch.stack([amax(member) for member in members]).amax()
            shared = stored_global_scale(largest, method, scheme.weight)
        weight, _ = quantize_weight(kept.weight.detach(), scheme.weight, method, shared, kept.name)
        scale = None
        if scheme.needs_input_scale:
            assert scheme.activation is not None
            seen = [self._input_amax[member] for member in members if member in self._input_amax]
            if not seen:
                hint = "calibrate it, or keep it with --keep"
                raise RecipeError(f"{kept.name}: no activation statistics", hint=hint)
            scale = input_scale(max(seen), scheme.activation)
        linear = QuantizedLinear(scheme, weight, scale).to(kept.weight.device)
        return PackedLinear(linear, kept.bias, is_emulating=True)


def _prepare(
    weights: HostedWeights,
    packer: _Packer,
    groups: Sequence[Group],
    statistics: ActivationStatistics,
    switch: Switch,
    root: nn.Module,
    prefix: str,
) -> None:
    """Puts choice linears in their places below `root`, which the model has at `prefix`, rounding into its caches."""
    group_of = {member: group for group in groups for member in group.members}
    found = {m.name: (path, m) for path, m in root.named_modules() if isinstance(m, KeptLinear) and m.name in group_of}

    def amax(module: str) -> Tensor:
        return found[module][1].weight.detach().abs().amax()

    for name, (path, kept) in found.items():
        options: dict[str, Pack] = {
            option.name: partial(packer.pack, option, amax)
            for option in group_of[name].options
            if option.rule is not None and option.rule.weight != KEEP
        }
        set_module(root, path, ChoiceLinear(kept, group_of[name].name, options, switch))
    for group in groups:
        if group.name == KV_GROUP:
            _prepare_caches(root, prefix, weights, group, statistics, switch)


def _prepare_caches(
    root: nn.Module,
    prefix: str,
    weights: HostedWeights,
    group: Group,
    statistics: ActivationStatistics,
    switch: Switch,
) -> None:
    for path, module in root.named_modules():
        if not (hasattr(module, "k_proj") and hasattr(module, "v_proj")):
            continue
        name = weights.stored[f"{prefix}{path}.k_proj"].removesuffix(".k_proj")
        if name not in statistics.kv_amax:
            continue
        scales = kv_scales(statistics.kv_amax[name])
        roundings = {o.name: kv_rounding(scales, o.name) for o in group.options if o.name != KEPT}

        def transform(key: Tensor, value: Tensor, known: Mapping[str, Any] = roundings) -> tuple[Tensor, Tensor]:
            rounding = known.get(switch.chosen.get(KV_GROUP, KEPT))
            return (key, value) if rounding is None else rounding(key, value)

        module.kv_transform = transform
