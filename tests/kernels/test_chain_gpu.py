"""Small kernels and linears behind one another by programmatic launches, on a GPU: nothing is read too early."""

import pytest
import torch
from torch import Tensor

from blockscale.formats.spec import NVFP4
from blockscale.formats.tensor import encode
from blockscale.kernels import linears
from blockscale.kernels.ops.attention import attention_decode
from blockscale.kernels.ops.between import add_rms_norm, gated, rotate_into_cache
from blockscale.kernels.ops.linear import linear_w4a16
from blockscale.kernels.paged_cache import KVFormat, PagedCache, allocate
from blockscale.kernels.prepare import PreparedWeight
from blockscale.models.layers import turns

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

HIDDEN, INNER, HEADS, KV_HEADS, SIZE = 1024, 2048, 8, 2, 128


def prepared(n: int, k: int, seed: int) -> PreparedWeight:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * k**-0.5
    return linears.prepare(encode(weight.bfloat16(), NVFP4).to("cuda"))


class Layer:
    """A decoder layer of these ops; with `is_waiting` every kernel ends before the next is launched."""

    def __init__(self, fmt: KVFormat) -> None:
        self.qkv = prepared((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN, 1)
        self.o = prepared(HIDDEN, HEADS * SIZE, 2)
        self.gate_up, self.down = prepared(2 * INNER, HIDDEN, 3), prepared(HIDDEN, INNER, 4)
        self.norm = torch.rand(HIDDEN, device="cuda") + 0.5
        self.norms = torch.rand(SIZE, device="cuda") + 0.5, torch.rand(SIZE, device="cuda") + 0.5
        self.fmt = fmt

    def cache(self) -> PagedCache:
        return allocate(self.fmt, 64, 16, KV_HEADS, SIZE, k_scale=0.05, v_scale=0.05, device="cuda")

    def __call__(self, x: Tensor, cache: PagedCache, slots: Tensor, *, is_waiting: bool = False) -> Tensor:
        def done(result: Tensor) -> Tensor:
            if is_waiting:
                torch.cuda.synchronize()
            return result

        tokens = x.shape[0]
        by = turns(slots % 64, 0.01 ** torch.linspace(0, 1, SIZE // 2, device="cuda"), 1.0)
        table = torch.arange(64, dtype=torch.int32, device="cuda").view(16, 4)[:tokens]
        lengths = (slots % 64 + 1).int()
        normed = done(add_rms_norm(x, None, self.norm, 1e-5)[1])
        heads = done(linear_w4a16(normed, self.qkv, None)).view(tokens, -1, SIZE)
        q = done(rotate_into_cache(heads, by.cos, by.sin, cache, slots, self.norms, 1e-6))
        attended = done(attention_decode(q, cache, table, lengths))
        y = done(linear_w4a16(attended.flatten(1), self.o, None))
        total, normed = add_rms_norm(x, y, self.norm, 1e-5)
        done(total)
        both = done(linear_w4a16(normed, self.gate_up, None))
        y = done(linear_w4a16(done(gated(both)), self.down, None))
        return done(add_rms_norm(total, y, self.norm, 1e-5)[1])


@pytest.mark.parametrize("fmt", list(KVFormat))
@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_a_chain_is_what_its_links_are_one_by_one(fmt: KVFormat, tokens: int) -> None:
    layer, slots = Layer(fmt), torch.arange(tokens, device="cuda") * 64
    chained, single = layer.cache(), layer.cache()
    for place in range(40):
        x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(place)).bfloat16().cuda()
        found = layer(x, chained, slots + place)
        assert torch.equal(found, layer(x, single, slots + place, is_waiting=True))


@pytest.mark.parametrize("fmt", list(KVFormat))
@pytest.mark.parametrize("tokens", [1, 8])
def test_a_thousand_replays_are_what_the_links_give_one_by_one(fmt: KVFormat, tokens: int) -> None:
    """Inputs change from replay to replay: what a kernel reads too early is another input's."""
    layer, slots = Layer(fmt), torch.arange(tokens, device="cuda") * 64 + 37
    chained, single = layer.cache(), layer.cache()

    def model(x: Tensor, cache: PagedCache, *, is_waiting: bool) -> Tensor:
        for _ in range(4):  # layers of a model follow one another
            x = layer(x, cache, slots, is_waiting=is_waiting)
        return x

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(tokens, HIDDEN, generator=generator).bfloat16().cuda() for _ in range(5)]
    expected = [model(x, single, is_waiting=True) for x in inputs]
    assert not torch.equal(expected[0], expected[1])
    x, graph = inputs[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x, chained, is_waiting=False)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for replay in range(1000):
        x.copy_(inputs[replay % 5])
        y.fill_(torch.nan)
        graph.replay()
        differing += (y != expected[replay % 5]).sum()
    assert int(differing) == 0
    for name in ("k", "v"):
        a, b = (getattr(cache, name).view(torch.uint8) for cache in (chained, single))
        assert torch.equal(a, b)  # both had the last of the inputs last
