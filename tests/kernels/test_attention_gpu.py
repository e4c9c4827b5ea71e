"""Attention as compiled, on a GPU: the PTX paths, split contexts, CUDA graphs."""

import pytest
import torch

from blockscale.kernels.paged_cache import KVFormat
from tests.kernels.attention_cases import decode_reference, error_units, make_case, prefill_reference, to_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
FORMATS = list(KVFormat)
LENGTHS = [700, 0, 1, 37, 1300]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"num_heads": 16, "head_dim": 128}, {}),
        ({"num_heads": 16, "head_dim": 128, "page_size": 64}, {"sinks": True}),
        ({"num_heads": 12, "num_kv_heads": 1, "head_dim": 80}, {"window": 5}),
        ({"num_heads": 8, "head_dim": 64, "dtype": torch.float16}, {"softcap": 3.0, "sinks": True}),
        ({"num_heads": 40, "num_kv_heads": 1, "head_dim": 256}, {"window": 100}),
        ({"num_heads": 14, "head_dim": 96}, {}),
    ],
)
def test_decode(fmt: KVFormat, shape: dict, options: dict) -> None:
    from blockscale.kernels.triton.attention_decode import attention_decode

    case = to_device(make_case(fmt, LENGTHS, **shape), "cuda")
    if "sinks" in options:
        options = {**options, "sinks": torch.randn(case.q.shape[1], device="cuda")}
    out = attention_decode(case.q, case.cache, case.page_table, case.lengths, **options)
    reference, bound = decode_reference(case, **options)
    assert error_units(out, reference, bound, fmt) <= 1


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [{"num_heads": 16, "head_dim": 128}, {"num_heads": 14, "head_dim": 80}])
@pytest.mark.parametrize("window", [0, 33])
def test_prefill(fmt: KVFormat, shape: dict, window: int) -> None:
    from blockscale.kernels.triton.attention_prefill import attention_prefill

    cu = [0, 300, 300, 301, 338, 1338]
    case = to_device(make_case(fmt, LENGTHS, num_queries=cu[-1], **shape), "cuda")
    starts = torch.tensor(cu, dtype=torch.int32, device="cuda")
    out = attention_prefill(case.q, case.cache, case.page_table, case.lengths, starts, window=window)
    reference, bound = prefill_reference(case, cu, window=window)
    assert error_units(out, reference, bound, fmt) <= 1


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_graph_replayed_follows_new_lengths_and_repeats_itself(fmt: KVFormat) -> None:
    from blockscale.kernels.triton.attention_decode import attention_decode

    case = to_device(make_case(fmt, [3000, 900], num_heads=16, head_dim=128), "cuda")
    attention_decode(case.q, case.cache, case.page_table, case.lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_decode(case.q, case.cache, case.page_table, case.lengths)
    for lengths in ([3000, 900], [17, 0], [2999, 450]):
        case.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        first = out.clone()
        reference, bound = decode_reference(case)
        assert error_units(first, reference, bound, fmt) <= 1
        for _ in range(300):
            graph.replay()
            assert torch.equal(out, first)
