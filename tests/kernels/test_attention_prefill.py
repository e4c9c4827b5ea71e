"""Prefill attention in Triton's interpreter, against float64."""

import pytest
import torch

from blockscale.errors import FormatError, UsageError
from blockscale.kernels.paged_cache import KVFormat
from tests.kernels.attention_cases import Case, attend, error_units, make_case, prefill_reference
from tests.kernels.interpreter import interpreted

prefill = interpreted("blockscale.kernels.triton.attention_prefill")
FORMATS = list(KVFormat)


def chunks(counts: list[int]) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts) + 1)]


def run(case: Case, cu: list[int], **options: object) -> torch.Tensor:
    starts = torch.tensor(cu, dtype=torch.int32)
    return prefill.attention_prefill(case.q, case.cache, case.page_table, case.lengths, starts, **options)


def assert_matches(case: Case, cu: list[int], **options: object) -> None:
    out = run(case, cu, tile=(16, 32, 2), **options)
    reference, bound = prefill_reference(case, cu, **options)
    assert error_units(out, reference, bound, case.cache.format) <= 1


@pytest.mark.parametrize("fmt", FORMATS)
def test_chunks_of_several_sequences_with_and_without_a_past(fmt: KVFormat) -> None:
    cu = chunks([9, 0, 1, 5, 20])  # in the middle, nothing to do, a decode step, whole prompts
    assert_matches(make_case(fmt, [37, 12, 70, 5, 20], num_queries=cu[-1]), cu)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_head_dimensions_and_odd_groups(fmt: KVFormat, head_dim: int) -> None:
    cu = chunks([6, 3])
    assert_matches(make_case(fmt, [20, 3], num_queries=9, num_heads=14, head_dim=head_dim), cu)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("window", [1, 5, 40])
def test_window(fmt: KVFormat, window: int) -> None:
    cu = chunks([12, 30])
    assert_matches(make_case(fmt, [50, 30], num_queries=42), cu, window=window)


@pytest.mark.parametrize("fmt", FORMATS)
def test_sinks_softcap_and_wide_pages(fmt: KVFormat) -> None:
    cu = chunks([7, 4])
    case = make_case(fmt, [70, 4], num_queries=11, page_size=64, dtype=torch.float16)
    assert_matches(case, cu, sinks=torch.tensor([0.5, -3.0, 9.0, 0.0]), softcap=2.0, scale=0.3)


def test_tiles_change_nothing_but_rounding() -> None:
    cu = chunks([17, 40])
    case = make_case(KVFormat.NVFP4, [30, 40], num_queries=57)
    reference, bound = prefill_reference(case, cu)
    for tile in ((16, 64, 2), (64, 64, 3), None):
        assert error_units(run(case, cu, tile=tile), reference, bound, KVFormat.NVFP4) <= 1


def test_nan_of_one_sequence_stays_there() -> None:
    cu = chunks([4, 4])
    case = make_case(KVFormat.FP8, [40, 40], num_queries=8)
    case.cache.k.view(torch.uint8)[case.page_table[0, 0].item(), 2] = 0x7F
    out = run(case, cu)
    assert out[:4].isnan().all()
    assert not out[4:].isnan().any()


def test_queries_past_the_last_chunk_belong_to_no_sequence() -> None:
    """A batch padded for a CUDA graph: the programs that find no queries leave."""
    cu = chunks([5, 0])
    case = make_case(KVFormat.FP8, [9, 0], num_queries=40)
    reference, bound = prefill_reference(case, cu)
    assert error_units(run(case, cu)[:5], reference[:5], bound[:5], KVFormat.FP8) <= 1


def test_nothing_to_do() -> None:
    case = make_case(KVFormat.FP8, [5])
    empty = Case(case.q[:0], case.cache, case.page_table, case.lengths)
    assert run(empty, [0, 0]).shape == (0, 4, 64)


def test_operands_that_do_not_fit_are_refused() -> None:
    case = make_case(KVFormat.FP8, [5, 6])
    with pytest.raises(FormatError, match="cu_seqlens"):
        run(case, [0, 2])
    with pytest.raises(FormatError, match="cu_seqlens"):
        prefill.attention_prefill(case.q, case.cache, case.page_table, case.lengths, torch.tensor([0, 1, 2]))


def test_dense_prompts_go_to_torch() -> None:
    q, k, v = (torch.randn(33, heads, 32).bfloat16() for heads in (4, 2, 2))
    reference, bound = attend(q, k.double(), v.double(), 0, scale=0.2)
    assert error_units(prefill.attention_dense(q, k, v, scale=0.2), reference, bound, KVFormat.BITS16) <= 1
    with pytest.raises(UsageError, match="k is"):
        prefill.attention_dense(q[:, :3], k, v)
    with pytest.raises(FormatError):
        prefill.attention_dense(q, k[:5], v)
