"""Decode attention in Triton's interpreter, against float64."""

import pytest
import torch

from blockscale.errors import FormatError, UsageError
from blockscale.kernels.paged_cache import KVFormat, PagedCache
from tests.kernels.attention_cases import POISON, Case, decode_reference, error_units, make_case
from tests.kernels.interpreter import interpreted

decode = interpreted("blockscale.kernels.triton.attention_decode")
FORMATS = list(KVFormat)


def run(case: Case, splits: int = 1, tokens: int = 16, warps: int = 2, **options: object) -> torch.Tensor:
    plan = decode.DecodePlan(tokens, warps, 2, splits)
    return decode.attention_decode(case.q, case.cache, case.page_table, case.lengths, plan=plan, **options)


def assert_matches(case: Case, out: torch.Tensor, **options: object) -> None:
    reference, bound = decode_reference(case, **options)
    assert error_units(out, reference, bound, case.cache.format) <= 1


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("splits", [1, 3])
def test_ragged_lengths_pages_out_of_order_and_poison_around_them(fmt: KVFormat, splits: int) -> None:
    case = make_case(fmt, [37, 0, 1, 70])
    out = run(case, splits)
    assert_matches(case, out)
    assert not out[1].any()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("head_dim", [16, 80, 96, 128, 256])
def test_head_dimensions(fmt: KVFormat, head_dim: int) -> None:
    case = make_case(fmt, [21, 40], head_dim=head_dim)
    assert_matches(case, run(case))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (7, 1), (12, 1), (40, 1), (6, 3)])
def test_groups_of_query_heads(num_heads: int, num_kv_heads: int) -> None:
    case = make_case(KVFormat.FP8, [33], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=32)
    assert_matches(case, run(case, 2))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("window", [1, 5, 20, 1000])
def test_window_smaller_and_larger_than_a_page(fmt: KVFormat, window: int) -> None:
    case = make_case(fmt, [50, 3, 0])
    assert_matches(case, run(case, 2, window=window), window=window)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("splits", [1, 4])
def test_sinks_and_softcap(fmt: KVFormat, splits: int) -> None:
    case = make_case(fmt, [50, 1, 0])
    options = {"sinks": torch.tensor([0.5, -3.0, 9.0, 0.0]), "softcap": 2.0, "scale": 0.3}
    out = run(case, splits, **options)
    assert_matches(case, out, **options)
    assert not out[2].any()  # a sink alone has no value


@pytest.mark.parametrize("fmt", FORMATS)
def test_wide_pages_and_steps(fmt: KVFormat) -> None:
    case = make_case(fmt, [130, 64, 63], page_size=64)
    assert_matches(case, run(case, 2, tokens=32))


@pytest.mark.parametrize("fmt", FORMATS)
def test_float16(fmt: KVFormat) -> None:
    case = make_case(fmt, [45], dtype=torch.float16)
    assert_matches(case, run(case))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("fmt", FORMATS)
def test_nan_of_one_sequence_stays_there(fmt: KVFormat, splits: int) -> None:
    case = make_case(fmt, [40, 40])
    page = case.page_table[0, 1].item()
    stored = case.cache.v if case.cache.v_block_scale is None else case.cache.v_block_scale
    stored.view(torch.uint8)[page, 3] = POISON[fmt]
    out = run(case, splits)
    assert out[0].isnan().all()
    reference, bound = decode_reference(case)
    assert error_units(out[1:], reference[1:], bound[1:], fmt) <= 1


def test_nan_query_stays_in_its_head() -> None:
    case = make_case(KVFormat.NVFP4, [20, 20])
    case.q[0, 1, 5] = float("nan")
    out = run(case)
    assert out[0, 1].isnan().all()
    assert not out[1].isnan().any()
    assert not out[0, [0, 2, 3]].isnan().any()


@pytest.mark.parametrize("magnitude", [1e30, 1e-30])
def test_queries_beyond_the_range_of_fp16(magnitude: float) -> None:
    """Scaled by a power of two they lose nothing; with the scale taken out again the logits are ordinary."""
    case = make_case(KVFormat.FP8, [33])
    out = run(Case(case.q * magnitude, case.cache, case.page_table, case.lengths), scale=0.1 / magnitude)
    scaled = Case((case.q * magnitude).double() / magnitude, case.cache, case.page_table, case.lengths)
    reference, bound = decode_reference(scaled, scale=0.1)
    assert error_units(out, reference, bound, KVFormat.FP8) <= 1


def test_token_major_caches_and_strided_queries() -> None:
    case = make_case(KVFormat.NVFP4, [37, 5])
    c = case.cache
    plain = PagedCache(c.format, c.k.contiguous(), c.v.contiguous(), c.k_block_scale.contiguous(),
                       c.v_block_scale.contiguous(), c.k_scale, c.v_scale, c.dtype)  # fmt: skip
    wide = torch.randn(2, 8, 128).to(case.q.dtype)
    wide[:, ::2, 64:] = case.q
    strided = Case(wide[:, ::2, 64:], plain, case.page_table, case.lengths)
    assert torch.equal(run(strided), run(case))


def test_nothing_to_do() -> None:
    case = make_case(KVFormat.FP8, [5])
    empty = Case(case.q[:0], case.cache, case.page_table[:0], case.lengths[:0])
    assert run(empty).shape == (0, 4, 64)


def test_plan_fills_the_device_and_follows_shapes_alone() -> None:
    cache = make_case(KVFormat.FP8, [5], num_kv_heads=2).cache
    device = decode.Device("cuda", (9, 0), "H200", 132, 227 << 10, 50 << 20)
    long = decode.plan_decode(cache, 32768, 1, 4, device)
    assert 1 < long.splits * 2 <= 132 * 32
    assert decode.plan_decode(cache, 32768, 4096, 4, device).splits == 1
    assert decode.plan_decode(cache, 16, 1, 4, device).splits == 1
    for max_tokens in (16, 500, 5000):
        assert decode.plan_decode(cache, max_tokens, 1, 4, device).splits <= max(1, max_tokens // 64)


def broken(case: Case, **changes: object) -> Case:
    return Case(**{**vars(case), **changes})


def test_operands_that_do_not_fit_are_refused() -> None:
    case = make_case(KVFormat.FP8, [5, 6])
    bad = {
        "dtype": broken(case, q=case.q.float()),
        "width": broken(case, q=case.q[..., :48]),
        "batch": broken(case, q=case.q[:1]),
        "table dtype": broken(case, page_table=case.page_table.long()),
        "table rows": broken(case, page_table=case.page_table[:1]),
        "lengths dtype": broken(case, lengths=case.lengths.long()),
        "device": broken(case, lengths=case.lengths.to("meta")),
    }
    for what, operands in bad.items():
        with pytest.raises(FormatError) as raised:
            run(operands)
        assert raised.value.hint, what
    with pytest.raises(UsageError, match="KV heads"):
        run(broken(case, q=case.q[:, :3]))
    with pytest.raises(UsageError, match="window"):
        run(case, window=-1)
    with pytest.raises(FormatError, match="sinks"):
        run(case, sinks=torch.zeros(3))
