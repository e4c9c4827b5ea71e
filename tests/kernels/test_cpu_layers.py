"""Rotary positions, gates and whole decoder layers on the CPU: against torch, and in one call as one by one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.kernels.cpu import decode, layers
from blockscale.kernels.cpu.library import library
from blockscale.kernels.paged_cache import KVFormat, PagedCache, allocate

ULP = 2.0**-24
HEADS, KV_HEADS, DIM, HIDDEN, INNER, PAGE = 4, 2, 32, 48, 40, 16

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some_turns(num: int, size: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    angles = normal(num, 1, size // 2, seed=seed) * 100
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


@pytest.mark.parametrize(
    ("num", "heads", "dim", "size"), [(1, 3, 32, 32), (5, 2, 48, 20), (70, 12, 64, 64), (2, 1, 6, 6)]
)
def test_turn(num: int, heads: int, dim: int, size: int) -> None:
    wide = normal(num, heads + 2, dim)
    x, (cos, sin) = wide[:, :heads], some_turns(num, size)
    found = decode.turn(x, cos, sin)
    assert found is not None
    turned = x[..., :size].double()
    swapped = torch.cat((turned[..., size // 2 :], turned[..., : size // 2]), -1)
    exact = torch.cat((turned * cos + swapped * sin, x[..., size:].double()), -1)
    largest = (turned.abs() * cos.abs() + swapped.abs() * sin.abs()).max()
    assert (found - exact).abs().max() <= 2 * ULP * largest
    assert torch.equal(found[..., size:], x[..., size:])
    for row in range(min(num, 3)):
        own = decode.turn(x[row : row + 1], cos[row : row + 1], sin[row : row + 1])
        assert own is not None
        assert torch.equal(own[0], found[row]), "a row depends on its batch"


@pytest.mark.parametrize(("num", "n"), [(1, 5), (1, 1536), (40, 1000)])
def test_silu_gate(num: int, n: int) -> None:
    x = normal(num, 2 * n) * 12
    found = decode.silu_gate(x)
    assert found is not None
    gate, up = x.double().chunk(2, -1)
    exact = gate / (1 + (-gate).exp()) * up
    # exp to 2 units (4 halves), a sum, a quotient and a product
    assert ((found - exact).abs() <= 2 * 8 * ULP * exact.abs()).all()
    assert torch.equal(decode.silu_gate(x[-1:]), found[-1:])  # type: ignore[arg-type]


def test_silu_gate_at_the_ends_of_the_range() -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.5, -86.0, -0.0, 0.0, 86.0, 88.0, 200.0, 1e30, torch.inf, torch.nan]])
    found = decode.silu_gate(torch.cat((gate, torch.ones_like(gate)), -1))
    assert found is not None
    exact = torch.nn.functional.silu(gate.double()).float()
    assert torch.allclose(found, exact, rtol=2e-6, atol=1e-35, equal_nan=True)


def random_layer(seed: int, *, window: int = 0, has_extras: bool = False) -> layers.LayerWeights:
    rows = (HEADS + 2 * KV_HEADS) * DIM

    def matrix(n: int, k: int, place: int) -> layers.Matrix:
        weight = (normal(n, k, seed=seed + place) * k**-0.5).bfloat16()
        return layers.Matrix(weight, normal(n, seed=seed + place + 50) if has_extras else None)

    norms = (normal(DIM, seed=seed), normal(DIM, seed=seed + 1)) if has_extras else None
    return layers.LayerWeights(
        1 + 0.1 * normal(HIDDEN, seed=seed + 2),
        1 + 0.1 * normal(HIDDEN, seed=seed + 3),
        norms,
        normal(HEADS, seed=seed + 4) if has_extras else None,
        matrix(rows, HIDDEN, 5),
        matrix(HIDDEN, HEADS * DIM, 6),
        matrix(2 * INNER, HIDDEN, 7),
        matrix(HIDDEN, INNER, 8),
        window,
    )


SHAPE = layers.Shape(HIDDEN, INNER, HEADS, KV_HEADS, DIM, 1e-5, DIM**-0.5, 0.0)


def in_float64(weights: list[layers.LayerWeights], x: Tensor, caches: list[PagedCache], given: Any) -> Tensor:
    """One token a sequence; keys and values are those that the call wrote."""
    turns, local_turns, table, lengths = given
    x = x.double()

    def norm(value: Tensor, weight: Tensor) -> Tensor:
        return value / (value.square().mean(-1, keepdim=True) + SHAPE.epsilon).sqrt() * weight.double()

    def product(value: Tensor, matrix: layers.Matrix) -> Tensor:
        y = value @ matrix.weight.double().T  # type: ignore[union-attr]
        return y if matrix.bias is None else y + matrix.bias.double()

    for layer, cache in zip(weights, caches, strict=True):
        heads = product(norm(x, layer.input_norm), layer.qkv).view(len(x), -1, DIM)[:, :HEADS]
        if layer.head_norms is not None:
            heads = norm(heads, layer.head_norms[0])
        cos, sin = local_turns if layer.window else turns
        q = heads * cos + heads.roll(DIM // 2, -1) * sin
        out = torch.empty(len(x), HEADS, DIM, dtype=torch.float64)
        for b, length in enumerate(lengths.tolist()):
            first = max(length - layer.window, 0) if layer.window else 0
            places = [(int(table[b, t // PAGE]), t % PAGE) for t in range(first, length)]
            k, v = (torch.stack([side[place] for place in places]).double() for side in (cache.k, cache.v))
            for h in range(HEADS):
                logits = k[:, h * KV_HEADS // HEADS] @ q[b, h] * SHAPE.scale
                if layer.sinks is not None:
                    logits = torch.cat((logits, layer.sinks[h : h + 1].double()))
                weight = logits.softmax(0)[: len(places)]
                out[b, h] = weight @ v[:, h * KV_HEADS // HEADS]
        x = x + product(out.flatten(1), layer.o)
        gate, up = product(norm(x, layer.middle_norm), layer.gate_up).chunk(2, -1)
        x = x + product(torch.nn.functional.silu(gate) * up, layer.down)
    return x


@pytest.mark.parametrize("has_extras", [False, True])
def test_whole_layers(has_extras: bool) -> None:
    weights = [random_layer(seed, window=window, has_extras=has_extras) for seed, window in ((0, 0), (100, 7))]
    whole = layers.decode_layers(weights, SHAPE)
    assert whole is not None
    caches = [allocate(KVFormat.BITS16, 6, PAGE, KV_HEADS, DIM) for _ in weights]
    for seed, cache in enumerate(caches):
        cache.k.copy_(normal(*cache.k.shape, seed=seed))
        cache.v.copy_(normal(*cache.v.shape, seed=seed + 9))
    assert whole.serves_caches(caches)
    table = torch.tensor([[5, 2], [0, 3], [1, 4]], dtype=torch.int32)
    lengths = torch.tensor([20, 1, 16], dtype=torch.int32)
    slots = torch.stack([table[b, (n - 1) // PAGE] * PAGE + (n - 1) % PAGE for b, n in enumerate(lengths.tolist())])
    given = (some_turns(3, DIM), some_turns(3, DIM, seed=4), table, lengths)
    x = normal(3, HIDDEN, seed=77)
    kept = x.clone()
    found = whole(x, caches, *given, slots.long())
    assert torch.equal(x, kept)
    exact = in_float64(weights, x, caches, given)
    # some hundred roundings of fp32, each of half a place, whose errors norms and gates pass on
    assert (found - exact).abs().max() <= 200 * ULP * exact.abs().max()
    for b in range(3):
        own = [t[b : b + 1] for t in (*given[0], *given[1], table, lengths)]
        alone = whole(x[b : b + 1], caches, (own[0], own[1]), (own[2], own[3]), own[4], own[5], slots[b : b + 1].long())
        assert torch.equal(alone[0], found[b]), "a row depends on its batch"


@pytest.mark.parametrize(
    ("table", "length", "slot"), [([[9]], 3, 2), ([[0]], 40, 2), ([[0]], 3, 6 * PAGE), ([[0]], 3, -1), ([[-1]], 3, 2)]
)
def test_what_lies_outside_of_the_pages_is_refused(table: list[list[int]], length: int, slot: int) -> None:
    whole = layers.decode_layers([random_layer(0)], SHAPE)
    assert whole is not None
    caches = [allocate(KVFormat.BITS16, 6, PAGE, KV_HEADS, DIM)]
    turns = some_turns(1, DIM)
    with pytest.raises(FormatError, match="outside"):
        whole(
            normal(1, HIDDEN),
            caches,
            turns,
            turns,
            torch.tensor(table, dtype=torch.int32),
            torch.tensor([length], dtype=torch.int32),
            torch.tensor([slot]),
        )


def test_what_the_kernels_do_not_have() -> None:
    layer = random_layer(0)
    assert layers.decode_layers([replace(layer, o=layers.Matrix(normal(HIDDEN, HEADS * DIM)))], SHAPE) is None
    assert layers.decode_layers([layer], replace(SHAPE, head_dim=20)) is None
    with pytest.raises(FormatError, match="down"):
        layers.decode_layers([replace(layer, down=layer.o)], SHAPE)
    whole = layers.decode_layers([layer], SHAPE)
    assert whole is not None
    assert not whole.serves_caches([allocate(KVFormat.FP8, 6, PAGE, KV_HEADS, DIM)])
    assert not whole.serves_caches([allocate(KVFormat.BITS16, 6, PAGE, KV_HEADS, DIM, dtype=torch.float16)])


def test_the_package_brings_every_source() -> None:
    """Headers that a source includes lie beside it."""
    folder = Path(layers.__file__).parent
    for source in folder.glob("*.[ch]"):
        for line in source.read_text().splitlines():
            if line.startswith('#include "'):
                assert (folder / line.split('"')[1]).is_file(), f"{source.name}: {line}"


def test_keys_and_values_in_their_slots() -> None:
    cache = allocate(KVFormat.BITS16, 4, PAGE, KV_HEADS, DIM)
    cache.k.fill_(7)
    cache.v.fill_(8)
    heads = normal(5, HEADS + 2 * KV_HEADS, DIM)
    heads[2, -1, 3], heads[2, -1, 4] = torch.nan, torch.inf
    k, v = heads[:, HEADS : HEADS + KV_HEADS], heads[:, HEADS + KV_HEADS :]
    slots = torch.tensor([3 * PAGE + 2, 0, 63, 17, 16])
    assert decode.write_pages(cache, k, v, slots)
    for side, written, rest in ((cache.k, k, 7.0), (cache.v, v, 8.0)):
        found = side[slots // PAGE, slots % PAGE]
        assert torch.equal(found.view(torch.int16)[:2], written.bfloat16().view(torch.int16)[:2])
        assert torch.equal(found.float().nan_to_num(9), written.bfloat16().float().nan_to_num(9))
        side[slots // PAGE, slots % PAGE] = rest
        assert (side == rest).all()
    for slot in (-1, 4 * PAGE):
        with pytest.raises(FormatError, match="slot"):
            decode.write_pages(cache, k[:2], v[:2], torch.tensor([0, slot]))
    assert (cache.k == 7).all(), "nothing is written then"
    assert not decode.write_pages(allocate(KVFormat.FP8, 4, PAGE, KV_HEADS, DIM), k, v, slots)
