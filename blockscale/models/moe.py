"""A layer's mixture of experts: its router, its experts in the form that serves them best, what all tokens share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from blockscale.checkpoint.reader import Checkpoint
from blockscale.checkpoint.source import SourceTensor
from blockscale.errors import ModelError
from blockscale.kernels.device import describe
from blockscale.kernels.experts import SILU, GatedActivation
from blockscale.kernels.select import Kernel, Op
from blockscale.kernels.select import choose as choose_kernel
from blockscale.models.cut import Stored
from blockscale.models.expert_weights import (
    Projection,
    bias_stack,
    can_pack,
    cut_experts,
    find_projection,
    packed_stack,
    plain_stack,
)
from blockscale.models.experts import Experts, PackedExperts, PlainExperts, Product, SeparateExperts
from blockscale.models.moe_config import MoEConfig, Routing
from blockscale.models.routing import Choice, Router, softmax_then_top, top_of_groups, top_then_softmax
from blockscale.models.shard import WHOLE, Shard

ReadLinear = Callable[[Stored, SourceTensor | None], Product]
# Names of an expert's projections, down last: of stacks (gate and up as one), and of linears.
_LEAVES = (("gate_up_proj", "down_proj"), ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


@dataclass(frozen=True)
class MoE:
    """y = experts(x) + shared(x); of several devices each has a part of the sum."""

    router: Router
    experts: Experts
    shared: Product | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, K]"""
        ids, weights = self.router(x)
        y = self.experts(x, ids, weights)
        return y if self.shared is None else y + self.shared(x)


def load_moe(
    checkpoint: Checkpoint,
    prefix: str,
    config: MoEConfig,
    hidden: int,
    read_linear: ReadLinear,
    *,
    device: torch.device,
    dtype: torch.dtype,
    is_emulating: bool,
    shared: Product | None = None,
    shard: Shard = WHOLE,
) -> MoE:
    """The layer at `prefix` (`model.layers.0.mlp`, Mixtral's `.block_sparse_moe`).

    hidden  width of the model
    shared  what the layer adds for all tokens, loaded by the caller
    The rest, and errors, as in `load_experts`.
    """
    is_gpt_oss = config.routing is Routing.TOP_THEN_SOFTMAX
    activation = GatedActivation(config.alpha, config.beta, config.limit, is_interleaved=is_gpt_oss)
    experts = load_experts(
        checkpoint,
        f"{prefix}.experts",
        (config.num_experts, hidden, config.inner),
        read_linear,
        device=device,
        dtype=dtype,
        is_emulating=is_emulating,
        activation=activation,
        is_transposed=is_gpt_oss,
        shard=shard,
    )
    router = load_router(checkpoint, prefix, config, hidden, device=device, dtype=dtype)
    return MoE(router, experts, shared)


def load_router(
    checkpoint: Checkpoint, prefix: str, config: MoEConfig, hidden: int, *, device: torch.device, dtype: torch.dtype
) -> Router:
    """Named `gate`, or `router` in gpt-oss. DeepSeek's computes in fp32, the others in `dtype`."""

    def read(name: str, *shape: int) -> Tensor:
        if name not in checkpoint.kept:
            raise ModelError(f"{name}: the checkpoint has no such tensor", hint="routers are kept in 16 bits")
        tensor = checkpoint.kept[name].read()
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{name}: the checkpoint has {list(tensor.shape)}, the model {list(shape)}",
                hint="config.json belongs to another model",
            )
        return tensor.to(device)

    is_gpt_oss = config.routing is Routing.TOP_THEN_SOFTMAX
    own = f"{prefix}.router" if is_gpt_oss else f"{prefix}.gate"
    weight = read(f"{own}.weight", config.num_experts, hidden)
    bias = read(f"{own}.bias", config.num_experts).to(dtype) if is_gpt_oss else None
    choose: Callable[[Tensor], Choice]
    match config.routing:
        case Routing.SOFTMAX_THEN_TOP:
            choose = partial(softmax_then_top, top_k=config.top_k, is_normalized=config.is_normalized)
        case Routing.TOP_THEN_SOFTMAX:
            choose = partial(top_then_softmax, top_k=config.top_k)
        case Routing.TOP_OF_GROUPS:
            choose = partial(
                top_of_groups,
                correction=read(f"{own}.e_score_correction_bias", config.num_experts).float(),
                top_k=config.top_k,
                num_groups=config.num_groups,
                num_chosen_groups=config.num_chosen_groups,
                is_normalized=config.is_normalized,
                factor=config.factor,
            )
            dtype = torch.float32
    return Router(weight.to(dtype), bias, choose)


def load_experts(
    checkpoint: Checkpoint,
    prefix: str,
    shape: tuple[int, int, int],
    read_linear: ReadLinear,
    *,
    device: torch.device,
    dtype: torch.dtype,
    is_emulating: bool,
    activation: GatedActivation = SILU,
    is_transposed: bool = False,
    shard: Shard = WHOLE,
) -> Experts:
    """The experts at `prefix`, whichever way the checkpoint keeps them.

    shape          (E, K, H): how many there are, of what width, and how wide inside
    read_linear    makes a linear of what is stored, and of its bias
    is_emulating   inputs are rounded where the checkpoint's scheme says so
    activation     of experts whose gate and up are one projection; where they are two, nothing is interleaved
    is_transposed  16-bit stacks are stored [E, K, N]
    shard          which part of the inner width; the results of all ranks are to be summed
    ModelError for experts that are not there, or of another shape.
    """
    num_experts, hidden, inner = shape
    first, down = _find(checkpoint, prefix, num_experts, is_transposed)
    part = shard.width("inner width of experts", inner)
    if not part.is_whole:
        flags = {"is_interleaved": activation.is_interleaved, "is_emulating": is_emulating}
        first, down = cut_experts(first, down, part, shard, **flags)
        inner = part.size
    if len(first) > 1:
        activation = replace(activation, is_interleaved=False)
    shapes = (num_experts, 2 * inner, hidden), (num_experts, hidden, inner)
    is_packed = can_pack([*first, down], is_emulating=is_emulating) and has_kernel(device)
    is_plain = all(projection.is_plain for projection in (*first, down))
    if not is_packed and not is_plain:
        return SeparateExperts(
            tuple(tuple(_linear(p, e, read_linear) for p in first) for e in range(num_experts)),
            tuple(_linear(down, e, read_linear) for e in range(num_experts)),
            activation,
        )
    biases = (bias_stack(first, *shapes[0][:2], device), bias_stack([down], *shapes[1][:2], device))
    if is_packed:
        stacks = packed_stack(first, shapes[0], device, dtype), packed_stack([down], shapes[1], device, dtype)
        return PackedExperts(*stacks, *biases, activation)
    plain = plain_stack(first, shapes[0], device, dtype), plain_stack([down], shapes[1], device, dtype)
    return PlainExperts(*plain, *biases, activation)


def has_kernel(device: torch.device) -> bool:
    """Whether the mixture-of-experts op has more than plain torch there. Where it has not, as on CPUs, the kernels of
    the linears are faster, and only those of chosen experts run."""
    return choose_kernel(Op.MOE_W4A16, describe(device)).kernel is not Kernel.TORCH


def _find(
    checkpoint: Checkpoint, prefix: str, num_experts: int, is_transposed: bool
) -> tuple[Sequence[Projection], Projection]:
    for leaves in _LEAVES:
        found = [find_projection(checkpoint, prefix, leaf, num_experts, is_transposed=is_transposed) for leaf in leaves]
        there = [projection for projection in found if projection is not None]
        if len(there) == len(leaves):
            return there[:-1], there[-1]
    raise ModelError(
        f"{prefix}: the checkpoint has no experts there under a known name",
        hint="it is incomplete, or made for another version of this architecture",
    )


def _linear(projection: Projection, expert: int, read_linear: ReadLinear) -> Product:
    return read_linear(projection.experts[expert], projection.biases[expert] if projection.biases else None)
