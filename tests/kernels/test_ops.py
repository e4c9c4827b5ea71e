"""The ops as torch's: schemas, traced shapes, torch.compile, and the same results as the kernels. Needs nothing."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from blockscale.errors import BlockscaleError, FormatError
from blockscale.formats.spec import MXFP4, NVFP4
from blockscale.formats.tensor import encode
from blockscale.kernels import select
from blockscale.kernels.experts import GPT_OSS
from blockscale.kernels.linears import kernel_for, prepare
from blockscale.kernels.ops import attention, between, linear, moe, quantize
from blockscale.kernels.ops.library import cache_parts
from blockscale.kernels.paged_cache import KVFormat, LatentCache, allocate
from blockscale.kernels.prepare import Layout, row_major
from blockscale.kernels.reference import attention as plain_attention
from blockscale.kernels.reference import linear as plain_linear
from blockscale.kernels.reference import moe as plain_moe


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No compiler: every op is served by plain torch, whatever this machine has."""
    monkeypatch.setenv("CC", "/nowhere/cc")
    torch._dynamo.reset()
    forget()
    yield
    forget()


def forget() -> None:
    for cached in (select.choose, select.usable, kernel_for):
        cached.cache_clear()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


ONE = torch.tensor(0.01)
CACHE = allocate(KVFormat.FP8, 4, 16, 2, 32, k_scale=0.02, v_scale=0.02)
LATENT = LatentCache(KVFormat.BITS16, torch.ones(4, 16, 96, dtype=torch.bfloat16), None, None, 32, torch.bfloat16)
TABLE, LENGTHS = torch.tensor([[1, 0], [2, 3]], dtype=torch.int32), torch.tensor([20, 31], dtype=torch.int32)
STACKS = tuple(row_major(encode(normal(3, *shape), MXFP4)) for shape in ((64, 32), (16, 32)))
IDS, WEIGHTS = torch.tensor([[0, 2], [1, -1]], dtype=torch.int32), torch.rand(2, 2)
CALLS = {
    "linear_w4a16": lambda x, w: linear.linear_w4a16(x, w, x[0, 0, :48]),
    "linear_w4a8": lambda x, w: linear.linear_w4a8(x, w),
    "linear_w4a4": lambda x, w: linear.linear_w4a4(x, w, input_global_scale=ONE),
    "quantize_nvfp4": lambda x, w: quantize.quantize_nvfp4(x),
    "add_rms_norm": lambda x, w: between.add_rms_norm(x[0], x[1], x[0, 0].float(), 1e-5),
    "gated": lambda x, w: between.gated(x[0]),
    "quantize_nvfp4_static": lambda x, w: quantize.quantize_nvfp4(x, ONE, swizzled=True)[:2],
    "rms_norm_quantize": lambda x, w: quantize.rms_norm_quantize(x, x[0, 0], ONE, residual=x * 2),
    "silu_mul_quantize": lambda x, w: quantize.silu_mul_quantize(x, x * 2, ONE, activation="gelu_tanh"),
    "hadamard_quantize": lambda x, w: quantize.hadamard_quantize(x, ONE, 32),
    "quantize_weight_sweep": lambda x, w: quantize.quantize_weight_sweep(x, ONE),
    "moe_w4a16": lambda x, w: moe.moe_w4a16(x[0, :2, :32], IDS, WEIGHTS, *STACKS, activation=GPT_OSS),
    "attention_decode": lambda x, w: attention.attention_decode(x[:, :2, :32].contiguous(), CACHE, TABLE, LENGTHS),
    "attention_mla": lambda x, w: attention.attention_mla(x[:, :2].contiguous(), LATENT, TABLE, LENGTHS, scale=0.1),
    "attention_prefill": lambda x, w: attention.attention_prefill(
        x[:, :2, :32].contiguous(), CACHE, TABLE, LENGTHS, torch.tensor([0, 1, 2], dtype=torch.int32), window=7
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_op_traces_as_it_runs(name: str) -> None:
    """Fake tensors have the shapes, dtypes and strides of real ones, and a compiled graph gives the same."""
    x, weight = normal(2, 3, 96), row_major(encode(normal(48, 96), NVFP4))
    call = CALLS[name]
    expected = call(x, weight)
    compiled = torch.compile(lambda x: call(x, weight), backend="aot_eager", fullgraph=True)(x)
    for a, b in zip(flat(compiled), flat(expected), strict=True):
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def flat(result: Tensor | tuple[Tensor | None, ...]) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [t for t in result if t is not None]


def test_every_op_of_the_table_is_torchs() -> None:
    for op in select.Op:
        assert hasattr(torch.ops.blockscale, op.value)
    assert {op.value for op in select.Op} == (set(CALLS) - {"quantize_nvfp4_static"}) | {
        "quantize_kv",
        "rotate_into_cache",
    }


def test_schemas_hold() -> None:
    x, weight = normal(2, 3, 96), row_major(encode(normal(48, 96), NVFP4))
    parts = linear._parts(weight)
    torch.library.opcheck(torch.ops.blockscale.linear_w4a16.default, (x, *parts, None))
    torch.library.opcheck(torch.ops.blockscale.linear_w4a4.default, (x, *parts, None, ONE))
    pages = allocate(KVFormat.BITS16, 4, 16, 2, 32)  # torch's checks do arithmetic, which float8 has none of
    cache, k, q = cache_parts(pages), normal(2, 2, 32), normal(2, 4, 32)
    torch.library.opcheck(torch.ops.blockscale.quantize_kv.default, (*cache, k, k, torch.tensor([3, -1])))
    torch.library.opcheck(
        torch.ops.blockscale.attention_decode.default, (q, *cache, TABLE, LENGTHS, None, 0, 0.0, None)
    )


def test_a_model_with_any_number_of_rows_is_compiled_once() -> None:
    weight = row_major(encode(normal(48, 96), NVFP4))
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(1)
        return graph

    model = torch.compile(lambda x: linear.linear_w4a16(x, weight) * 2, backend=count, fullgraph=True, dynamic=True)
    for m in (2, 5, 33):
        x = normal(m, 96)
        assert torch.equal(model(x), plain_linear.linear_w4a16(x, weight) * 2)
    assert len(graphs) == 1


def test_ops_are_the_references_here() -> None:
    x, q = normal(5, 96), encode(normal(48, 96), NVFP4)
    assert prepare(q).layout is Layout.ROW_MAJOR
    assert torch.equal(linear.linear_w4a8(x, prepare(q)), plain_linear.linear_w4a8(x, row_major(q)))
    tokens = normal(2, 32)
    found = moe.moe_w4a16(tokens, IDS, WEIGHTS, *STACKS)
    assert torch.equal(found, plain_moe.moe_w4a16(tokens, IDS, WEIGHTS, *STACKS))
    k = normal(40, 2, 32)
    quantize.quantize_kv(CACHE, k, k, torch.arange(40))
    query = normal(2, 4, 32)
    found = attention.attention_decode(query, CACHE, TABLE, LENGTHS, softcap=5.0)
    assert torch.equal(found, plain_attention.attention_decode(query, CACHE, TABLE, LENGTHS, softcap=5.0))
    assert found.abs().sum() > 0


def test_errors_keep_their_kind_and_hint() -> None:
    weight = row_major(encode(normal(48, 96), NVFP4))
    with pytest.raises(FormatError, match=r"linear_w4a16: x is bfloat16 \[2, 64\]") as caught:
        linear.linear_w4a16(normal(2, 64), weight)
    assert caught.value.hint == "the last dimension of x must be 96"
    with pytest.raises(BlockscaleError, match="bias is"):
        linear.linear_w4a16(normal(2, 96), weight, normal(47))


def test_rows_past_what_32_bits_count() -> None:
    """A stride beyond 2^31 elements, without the memory for it."""
    weight = row_major(encode(normal(16, 32), NVFP4))
    x = torch.empty(1, dtype=torch.bfloat16).expand(2**31 // 32 + 1, 32)
    with torch.device("meta"):
        y = torch.ops.blockscale.linear_w4a16(x.to("meta"), *linear._parts(weight), None)
    assert y.shape == (2**31 // 32 + 1, 16)
