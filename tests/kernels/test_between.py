"""The ops between linears: schemas, what serves them, and self-tests that see a mistake."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from blockscale.errors import FormatError, UsageError
from blockscale.kernels.device import Device, describe
from blockscale.kernels.ops import between
from blockscale.kernels.ops.library import cache_parts
from blockscale.kernels.paged_cache import KVFormat, PagedCache, allocate
from blockscale.kernels.reference import between as plain
from blockscale.kernels.select import Choice, Kernel, Op, choose
from blockscale.kernels.selftest import between as selftest
from blockscale.kernels.selftest.outcome import Mismatch

CPU = torch.device("cpu")
OPS = (Op.ADD_RMS_NORM, Op.GATED, Op.ROTATE_INTO_CACHE)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """heads [2, 8, 32], cos and sin [2, 1, 16]"""
    angles = torch.arange(2)[:, None, None] * torch.ones(8)
    return normal(2, 8, 32), torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)


def torch_choice(op: Op) -> Choice:
    return choose(op, describe(CPU))


def test_schemas_hold() -> None:
    ops = torch.ops.blockscale
    x, weight = normal(3, 48), torch.ones(48)
    torch.library.opcheck(ops.add_rms_norm.default, (x, x.flip(0), weight, 1e-5))
    torch.library.opcheck(ops.add_rms_norm.default, (x, None, weight, 1e-5))
    torch.library.opcheck(ops.gated.default, (x, "silu", 1.0, 1.0))
    cache, (heads, cos, sin) = allocate(KVFormat.BITS16, 4, 16, 2, 32), operands()
    slots = torch.tensor([3, -1])
    rest = (heads, cos, sin, slots, None, None, 1e-6)
    torch.library.opcheck(ops.rotate_into_cache.default, (*cache_parts(cache), *rest))


def test_results_are_the_references() -> None:
    x, added, weight = normal(3, 48), normal(3, 48, seed=1), torch.rand(48)
    total, out = between.add_rms_norm(x, added, weight, 1e-5)
    assert torch.equal(total, x + added)
    assert torch.equal(out, plain.add_rms_norm(x, added, weight, 1e-5)[1])
    assert between.add_rms_norm(x, None, weight, 1e-5)[0] is x
    assert torch.equal(between.gated(x, "clamped", alpha=1.5, limit=0.5), plain.gated(x, "clamped", 1.5, 0.5))
    caches = [allocate(KVFormat.BITS16, 4, 16, 2, 32) for _ in range(2)]
    heads, cos, sin = operands()
    slots = torch.tensor([3, 40])
    q = between.rotate_into_cache(heads, cos, sin, caches[0], slots)
    assert torch.equal(q, plain.rotate_into_cache(heads, cos, sin, caches[1], slots))
    assert torch.equal(caches[0].k, caches[1].k)
    assert torch.equal(caches[0].v[2, 8], heads[1, 6:])  # slot 40, values as they are


def test_a_wrong_activation_is_refused() -> None:
    with pytest.raises(UsageError, match="no activation 'relu'"):
        between.gated(normal(2, 8), "relu")
    with pytest.raises(FormatError, match="two halves"):
        between.gated(normal(2, 7))


@pytest.mark.parametrize("op", OPS)
def test_triton_serves_gpus_and_torch_the_rest(op: Op) -> None:
    assert torch_choice(op).kernel is Kernel.TORCH
    hopper = Device("cuda", (9, 0), "H200", 132, 232_448, 50 << 20)
    assert choose(op, hopper).kernel is Kernel.TRITON_CHAIN
    assert "cases" in selftest.test_between(torch_choice(op), CPU)


def no_weight(x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return plain.add_rms_norm(x, added, torch.ones_like(weight), epsilon)


def halves_exchanged(both: Tensor, *options: Any) -> Tensor:
    return plain.gated(both.roll(both.shape[-1] // 2, -1), *options)


def other_way(heads: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> Tensor:
    return plain.rotate_into_cache(heads, cos, -sin, *rest)


def other_epsilon(x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return plain.add_rms_norm(x, added, weight, 0.1)


def sum_in_fp32(x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    total, out = plain.add_rms_norm(x, added, weight, epsilon)
    return (total if added is None else x.float() + added), out


def no_limit(both: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    return plain.gated(both, activation, alpha, 1e9)


def norm_after_turn(heads: Tensor, cos: Tensor, sin: Tensor, cache: Any, slots: Tensor, norms: Any, e: float) -> Tensor:
    q = plain.rotate_into_cache(heads, cos, sin, cache, slots, norms, e)
    if norms is None:
        return q
    turned = plain.rotate_into_cache(heads, cos, sin, cache, slots, None, e)
    return plain.add_rms_norm(turned.flatten(0, 1), None, norms[0], e)[1].view_as(turned)


MISTAKES = (
    (Op.ADD_RMS_NORM, no_weight, "rounding explains"),
    (Op.ADD_RMS_NORM, other_epsilon, "rounding explains"),
    (Op.ADD_RMS_NORM, sum_in_fp32, "sum: torch.float32"),
    (Op.GATED, halves_exchanged, "rounding explains"),
    (Op.GATED, no_limit, "clamped: .* rounding explains"),
    (Op.ROTATE_INTO_CACHE, other_way, "queries: .* bytes differ"),
    (Op.ROTATE_INTO_CACHE, norm_after_turn, "normed, queries: .* rounding explains"),
)


@pytest.mark.parametrize(("op", "wrong", "words"), MISTAKES)
def test_a_mistake_fails(monkeypatch: pytest.MonkeyPatch, op: Op, wrong: Any, words: str) -> None:
    monkeypatch.setattr(selftest, "launcher", lambda *_: wrong)
    with pytest.raises(Mismatch, match=words):
        selftest.test_between(torch_choice(op), CPU)


def values_left_out(cache: PagedCache, before: PagedCache) -> None:
    cache.v.copy_(before.v)


def last_bytes_of_keys_left_out(cache: PagedCache, before: PagedCache) -> None:
    cache.k.view(torch.uint8)[..., -1] = before.k.view(torch.uint8)[..., -1]


def one_place_too_many(cache: PagedCache, before: PagedCache) -> None:
    untouched = (cache.k.view(torch.uint8) == before.k.view(torch.uint8)).all(-1).all(-1).nonzero()
    cache.k.view(torch.uint8)[tuple(untouched[0])] = 0


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (values_left_out, "bytes of v"),
        (last_bytes_of_keys_left_out, "bytes of k"),
        (one_place_too_many, "places of k that nothing goes to"),
    ],
)
def test_a_mistake_in_the_cache_fails(monkeypatch: pytest.MonkeyPatch, spoil: Any, words: str) -> None:
    def wrong(heads: Tensor, cos: Tensor, sin: Tensor, cache: PagedCache, slots: Tensor, *rest: Any) -> Tensor:
        before = replace(cache, k=cache.k.clone(), v=cache.v.clone())
        q = plain.rotate_into_cache(heads, cos, sin, cache, slots, *rest)
        spoil(cache, before)
        return q

    monkeypatch.setattr(selftest, "launcher", lambda *_: wrong)
    with pytest.raises(Mismatch, match=words):
        selftest.test_between(torch_choice(Op.ROTATE_INTO_CACHE), CPU)


@pytest.mark.parametrize("fmt", list(KVFormat))
def test_a_compiled_graph_writes_the_cache_it_is_given(fmt: KVFormat) -> None:
    heads, cos, sin = operands()
    caches = [allocate(fmt, 4, 16, 2, 32, k_scale=0.02, v_scale=0.02) for _ in range(2)]
    slots, norms = torch.tensor([3, 40]), (torch.rand(32), torch.rand(32))

    def call(heads: Tensor, cache: PagedCache) -> Tensor:
        return between.rotate_into_cache(heads, cos, sin, cache, slots, norms)

    expected = call(heads, caches[0])
    found = torch.compile(lambda x: call(x, caches[1]), backend="aot_eager", fullgraph=True)(heads)
    assert torch.equal(found, expected)
    for name in ("k", "v", "k_block_scale", "v_block_scale"):
        a, b = (getattr(cache, name) for cache in caches)
        if a is not None:
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            assert a.view(torch.uint8).any()


def test_operands_that_do_not_fit_are_refused_without_a_gpu_too() -> None:
    x, weight = normal(2, 16), torch.ones(16)
    heads, cos, sin = operands()
    cache, slots = allocate(KVFormat.BITS16, 4, 16, 2, 32), torch.tensor([3, 40])
    with pytest.raises(FormatError, match=r"add_rms_norm: weight is bfloat16 \[16\]"):
        between.add_rms_norm(x, None, weight.bfloat16(), 1e-5)
    with pytest.raises(FormatError, match=r"add_rms_norm: added is float32"):
        between.add_rms_norm(x, x.float(), weight, 1e-5)
    with pytest.raises(FormatError, match=r"rotate_into_cache: 4 heads of 32, 2 of them keys"):
        between.rotate_into_cache(heads[:, :4], cos, sin, cache, slots)
    with pytest.raises(FormatError, match="15 elements turned"):
        between.rotate_into_cache(heads, cos[..., :15], sin[..., :15], cache, slots)
    with pytest.raises(FormatError, match="cos is"):
        between.rotate_into_cache(heads, cos.double(), sin, cache, slots)
    with pytest.raises(FormatError, match="k_norm is"):
        between.rotate_into_cache(heads, cos, sin, cache, slots, (torch.ones(32), torch.ones(16)))
    assert not cache.k.any()
