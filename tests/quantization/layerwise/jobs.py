"""Jobs of one site, from tensors that a test makes up."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.algorithms.statistics import Moments
from blockscale.checkpoint.linear import W4A4, Scheme
from blockscale.checkpoint.source import SourceTensor
from blockscale.quantization.layerwise.capture import SiteInputs
from blockscale.quantization.layerwise.method import METHODS, Method
from blockscale.quantization.layerwise.site import SiteJob
from blockscale.quantization.layerwise.tokens import TokenStore
from blockscale.quantization.plan import PlannedLinear
from blockscale.quantization.weight import ScaleMethod

K = 64
NAMES = ("a.0.q_proj", "a.0.k_proj", "a.0.v_proj")


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def correlated(tokens: int, seed: int) -> Tensor:
    """Tokens [tokens, K] from a space of fewer dimensions, with channels of unlike size."""
    mixing = normal(24, K, seed=99)
    mixing[:, 5] *= 12
    return normal(tokens, 24, seed=seed) @ mixing + 0.1 * normal(tokens, K, seed=seed + 1)


def planned(name: str, shape: tuple[int, ...], scheme: Scheme = W4A4) -> PlannedLinear:
    tensor = SourceTensor(f"{name}.weight", torch.bfloat16, shape, ())
    return PlannedLinear(name, tensor, scheme, ScaleMethod.SWEEP, shape)


def inputs(folder: Path, train: Sequence[Tensor], held: Sequence[Tensor], limit_bytes: int = 1 << 30) -> SiteInputs:
    stores = [TokenStore(folder / name, "cpu", limit_bytes) for name in ("train", "held")]
    for store, parts in zip(stores, (train, held), strict=True):
        for part in parts:
            store.add(part)
    return SiteInputs(*stores)


def site_job(
    seen: SiteInputs,
    weights: Mapping[str, Tensor] | None = None,
    *,
    reference: SiteInputs | None = None,
    smoothing: Tensor | None = None,
    method: str | Method = "best",
    scheme: Scheme | Mapping[str, Scheme] = W4A4,
    activation_scale: ActivationScale = ActivationScale.FOUR_OVER_SIX,
    pooled: Moments | None = None,
) -> SiteJob:
    """By default of q, k and v with 32 rows each."""
    if weights is None:
        weights = {name: 0.1 * normal(32, K, seed=i) for i, name in enumerate(NAMES)}
    schemes = scheme if isinstance(scheme, Mapping) else dict.fromkeys(weights, scheme)
    linears = {name: planned(name, tuple(weight.shape), schemes[name]) for name, weight in weights.items()}
    method = METHODS[method] if isinstance(method, str) else method
    return SiteJob(linears, weights, seen, reference, smoothing, method, activation_scale, pooled)
