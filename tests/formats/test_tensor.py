"""What holds for every format: shapes, dtypes, errors, symmetry, idempotence, refusals."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockscale.errors import FormatError, NonFiniteError
from blockscale.formats.mx import ScaleRule
from blockscale.formats.spec import FORMATS, INT4, MXFP4, NVFP4, NVFP4_BLOCK32, Format, Granularity, Minifloat
from blockscale.formats.tensor import QuantizedTensor, decode, empty_like_quantized, encode

from . import golden
from .strategies import DTYPES, build, tensors

each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)


def fit_shape(x: Tensor, fmt: Format) -> Tensor:
    """A 2-D view of `x` where the format takes nothing else."""
    return x.reshape(-1, x.shape[-1]) if fmt.granularity is Granularity.TILE else x


def scale_per_element(q: QuantizedTensor) -> Tensor:
    """float64, broadcastable against q.shape: what each code is multiplied by."""
    fmt, scale = q.format, q.block_scale
    if fmt.name.startswith("mx"):
        values = 2.0 ** (scale.double() - 127)
    else:
        values = scale.double() * (1.0 if q.global_scale is None else q.global_scale.double())
    if fmt.granularity is Granularity.BLOCK:
        return values.repeat_interleave(fmt.block_size, -1)
    if fmt.granularity is Granularity.TILE:
        size = fmt.block_size
        return values.repeat_interleave(size, 0)[: q.shape[0]].repeat_interleave(size, 1)[:, : q.shape[1]]
    return values


def same_bytes(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    def equal(s: Tensor | None, t: Tensor | None) -> bool:
        if s is None or t is None:
            return s is t
        return s.dtype == t.dtype and torch.equal(
            s.contiguous().view(-1).view(torch.uint8), t.contiguous().view(-1).view(torch.uint8)
        )

    return equal(a.packed, b.packed) and equal(a.block_scale, b.block_scale) and equal(a.global_scale, b.global_scale)


@each_format
@settings(max_examples=20, deadline=None)
@given(x=tensors())
def test_any_rank_and_dtype(fmt: Format, x: Tensor) -> None:
    x = fit_shape(x, fmt)
    before = x.clone()
    q = encode(x, fmt)
    assert torch.equal(x, before)
    assert q.format is fmt
    assert q.shape == tuple(x.shape)
    assert q.dtype == x.dtype
    assert tuple(q.packed.shape) == (*x.shape[:-1], x.shape[-1] * fmt.element.bits // 8)
    assert (q.global_scale is not None) == fmt.has_global_scale
    value = decode(q)
    assert value.dtype == torch.float32
    assert value.shape == x.shape
    assert value.isfinite().all()
    assert torch.equal(q.dequantize(), value.to(x.dtype))
    assert torch.equal(q.dequantize(torch.bfloat16), value.bfloat16())


@each_format
@settings(max_examples=15, deadline=None)
@given(x=tensors(dtypes=(torch.bfloat16, torch.float16)))
def test_16_bit_input_is_its_fp32_copy(fmt: Format, x: Tensor) -> None:
    x = fit_shape(x, fmt)
    assert same_bytes(encode(x, fmt), encode(x.float(), fmt))


@each_format
def test_strided_input(fmt: Format) -> None:
    x = build("normal", (128, 256), 3)
    for view in (x.t(), x[::2], x[:, ::2], x[64:96, 128:], x[:9].flip(0), x[:1].expand(4, 256)):
        assert same_bytes(encode(view, fmt), encode(view.contiguous(), fmt))


@each_format
def test_a_parameter_leaves_no_graph(fmt: Format) -> None:
    q = encode(torch.nn.Parameter(build("normal", (4, 128), 0)), fmt)
    assert not any(t.requires_grad for t in (q.packed, q.block_scale, decode(q)))
    assert q.global_scale is None or not q.global_scale.requires_grad


@each_format
@settings(max_examples=25, deadline=None)
@given(x=tensors())
def test_error_is_within_half_a_step(fmt: Format, x: Tensor) -> None:
    """Below the saturating value every element lies within half the gap between neighbours, of its own binade."""
    x = fit_shape(x, fmt)
    q = encode(x, fmt, scale_rule=ScaleRule.FIT)
    scale = scale_per_element(q).expand(x.shape)
    y = x.double().abs() / scale  # in units of the element
    error = (x.double() - decode(q).double()).abs() / scale
    if fmt.element == INT4:
        half_gap = torch.full_like(y, 0.5)
    else:
        assert isinstance(fmt.element, Minifloat)
        m, smallest = fmt.element.mantissa_bits, fmt.element.min_normal
        half_gap = 2.0 ** (torch.floor(torch.log2(y.clamp(min=smallest))) - m - 1)
    excess = (y - fmt.element.max).clamp(min=0)  # the scale itself was rounded down
    assert (error <= torch.maximum(half_gap, excess) + (y + 1) * 2.0**-21).all()


@each_format
@settings(max_examples=25, deadline=None)
@given(x=tensors())
def test_error_against_the_largest_magnitude(fmt: Format, x: Tensor) -> None:
    """The bound that a user can quote: the largest error, as a part of the largest magnitude that shares its scale."""
    x = fit_shape(x, fmt).float()
    value = decode(encode(x, fmt))
    if fmt.granularity is Granularity.BLOCK:
        error, x = ((t.unflatten(-1, (-1, fmt.block_size))) for t in (x - value, x))
    else:
        error = x - value
    if fmt.element == INT4:
        bound = 1 / 14 * (1 + 2.0**-8)  # half a step of amax / 7, rounded to bf16
    else:
        assert isinstance(fmt.element, Minifloat)
        u = 2.0 ** -(fmt.element.mantissa_bits + 1)
        bound = u / (1 + u)  # half a unit, at the start of a binade
        if fmt.name.startswith("mx"):  # EVEN saturates up to where it would round amax to the next binade
            bound = max(bound, 1 - fmt.element.max / 2.0**fmt.element.max_exponent / (2 - u))
    largest = x.abs().amax(-1) if fmt.granularity is Granularity.BLOCK else x.abs().amax()
    worst = error.abs().amax(-1) if fmt.granularity is Granularity.BLOCK else error.abs().amax()
    keep = torch.ones_like(worst, dtype=torch.bool)
    if fmt.has_global_scale:  # an E4M3 scale below 2^-6 is subnormal and coarser
        keep = largest >= largest.max() * 2.0**-14
    assert (worst <= largest * bound * (1 + 2.0**-20))[keep].all()


@each_format
@settings(max_examples=15, deadline=None)
@given(x=tensors())
def test_sign_symmetry(fmt: Format, x: Tensor) -> None:
    x = fit_shape(x, fmt)
    plus, minus = encode(x, fmt), encode(-x, fmt)
    assert torch.equal(plus.block_scale.view(-1).view(torch.uint8), minus.block_scale.view(-1).view(torch.uint8))
    assert torch.equal(decode(plus), -decode(minus))


@each_format
@settings(max_examples=15, deadline=None)
@given(x=tensors(dtypes=(torch.float32,)), exponent=st.integers(-40, 40))
def test_power_of_two_moves_into_the_scale(fmt: Format, x: Tensor, exponent: int) -> None:
    x = fit_shape(x, fmt)
    factor = 2.0**exponent
    q, scaled = encode(x, fmt), encode(x * factor, fmt)
    assert torch.equal(decode(scaled), decode(q) * factor)
    if not x.any():
        return
    assert torch.equal(scaled.packed.view(torch.uint8), q.packed.view(torch.uint8))
    if q.global_scale is not None:
        assert scaled.global_scale is not None
        assert torch.equal(scaled.global_scale, q.global_scale * factor)
        assert torch.equal(scaled.block_scale.float(), q.block_scale.float())


@each_format
@settings(max_examples=20, deadline=None)
@given(x=tensors())
def test_encoding_again_with_the_same_scales_changes_nothing(fmt: Format, x: Tensor) -> None:
    x = fit_shape(x, fmt)
    q = encode(x, fmt)
    again = encode(decode(q), fmt, block_scale=q.block_scale, global_scale=q.global_scale)
    assert torch.equal(decode(again), decode(q))
    third = encode(decode(again), fmt, block_scale=q.block_scale, global_scale=q.global_scale)
    assert same_bytes(third, again)  # only the first may differ in bytes: a -0 becomes 0


@each_format
@pytest.mark.parametrize("rule", ScaleRule, ids=lambda r: r.value)
@settings(max_examples=20, deadline=None)
@given(x=tensors())
def test_encoding_again_from_amax_changes_nothing(fmt: Format, rule: ScaleRule, x: Tensor) -> None:
    x = fit_shape(x, fmt)
    if not fmt.name.startswith("mx") and rule is not ScaleRule.EVEN:
        return  # the rule concerns MX alone
    if fmt is NVFP4_BLOCK32:
        return  # its largest block scale, 448 / 6, is no E4M3 number, so the amax itself moves
    once = decode(encode(x, fmt, scale_rule=rule))
    twice = decode(encode(once, fmt, scale_rule=rule))
    if fmt.name.startswith("mx") or fmt.element == INT4:
        assert torch.equal(twice, once)
        return
    # An fp32 scale may come back one unit off: amax = code * scale was rounded, and is divided again.
    keep = torch.ones_like(once, dtype=torch.bool)
    if fmt.has_global_scale:
        # A subnormal E4M3 scale rounds by up to a third, so that its block need not reach 6 again: the format's limit.
        blocks = once.abs().unflatten(-1, (-1, fmt.block_size))
        is_large = blocks.amax(-1, keepdim=True) >= blocks.max() * 2.0**-14
        keep = is_large.expand_as(blocks).flatten(-2)
    assert ((twice - once).abs() <= once.abs() * 2.0**-21)[keep].all()


@each_format
def test_bytes_are_the_bits_the_format_claims(fmt: Format) -> None:
    q = encode(build("normal", (256, 512), 0), fmt)
    extra = {Granularity.TENSOR: 4, Granularity.CHANNEL: 4 * 256, Granularity.TOKEN: 4 * 256}.get(fmt.granularity, 0)
    extra += 4 if fmt.has_global_scale else 0
    assert q.num_bytes == 256 * 512 * fmt.bits_per_element / 8 + extra


@each_format
@settings(max_examples=10, deadline=None)
@given(x=tensors())
def test_an_empty_one_has_the_shapes_and_dtypes_of_a_full_one(fmt: Format, x: Tensor) -> None:
    x = fit_shape(x, fmt)
    full, empty = encode(x, fmt), empty_like_quantized(tuple(x.shape), fmt, x.dtype)
    assert (empty.format, empty.shape, empty.dtype) == (full.format, full.shape, full.dtype)
    for a, b in (
        (empty.packed, full.packed),
        (empty.block_scale, full.block_scale),
        (empty.global_scale, full.global_scale),
    ):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert (a.shape, a.dtype, a.device.type) == (b.shape, b.dtype, "meta")


def test_a_quantized_tensor_is_frozen() -> None:
    q = encode(torch.ones(16), NVFP4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        q.shape = (1, 16)  # type: ignore[misc]


def test_a_global_scale_is_kept_only_where_the_format_has_one() -> None:
    x = torch.ones(2, 32)
    assert encode(x, MXFP4, global_scale=torch.tensor(2.0)).global_scale is None
    given_scale = torch.tensor(2.0)
    assert encode(x, NVFP4, global_scale=given_scale).global_scale is given_scale


@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_names_tensor_and_first_position(fmt: Format, dtype: torch.dtype, value: float) -> None:
    x = torch.ones(4, 256, dtype=dtype)
    x[2, 17] = x[2, 200] = x[3, 0] = value
    with pytest.raises(NonFiniteError, match=rf"^model\.q_proj: {value} at \[2, 17\]$") as raised:
        encode(x, fmt, name="model.q_proj")
    assert raised.value.hint


@each_format
@pytest.mark.parametrize(
    ("case", "found"), [("special_inf_fp32", r"inf at \[0, 3\]"), ("special_nan_fp32", r"nan at \[1, 5\]")]
)
def test_non_finite_golden_cases(fmt: Format, case: str, found: str) -> None:
    x = golden.source(case)
    if fmt.granularity is Granularity.BLOCK and x.shape[-1] % fmt.block_size:
        x = torch.nn.functional.pad(x, (0, -x.shape[-1] % fmt.block_size))
    with pytest.raises(NonFiniteError, match=f"tensor: {found}"):
        encode(x, fmt)


def test_position_in_a_stack_and_in_a_vector() -> None:
    x = torch.ones(2, 3, 32)
    x[1, 0, 31] = torch.nan
    with pytest.raises(NonFiniteError, match=r"\[1, 0, 31\]"):
        encode(x, NVFP4)
    with pytest.raises(NonFiniteError, match=r"nan at \[31\]"):
        encode(x[1, 0], NVFP4)
    with pytest.raises(NonFiniteError, match=r"\[31, 0\]"):  # of the view, not of the memory below it
        encode(x[1, :1].t().expand(32, 16), NVFP4)


@each_format
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.int8, torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn],
    ids=str,
)
def test_other_dtypes_are_refused(fmt: Format, dtype: torch.dtype) -> None:
    with pytest.raises(FormatError, match=r"w: cannot quantize torch\.") as raised:
        encode(torch.ones(128, 128).to(dtype), fmt, name="w")
    assert "bfloat16" in raised.value.hint


@each_format
@pytest.mark.parametrize("shape", [(), (0,), (0, 128), (128, 0), (2, 0, 128)], ids=str)
def test_empty_and_0d_are_refused(fmt: Format, shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError, match="w: cannot quantize an empty or 0-d tensor"):
        encode(torch.ones(shape), fmt, name="w")


@pytest.mark.parametrize(
    "fmt", [f for f in FORMATS.values() if f.granularity is Granularity.BLOCK], ids=lambda f: f.name
)
@pytest.mark.parametrize("extra", [1, 8, -1])
def test_a_last_dimension_of_no_whole_blocks_is_refused(fmt: Format, extra: int) -> None:
    length = 2 * fmt.block_size + extra
    with pytest.raises(
        FormatError, match=f"w: last dimension {length} is not a multiple of {fmt.name}'s block"
    ) as raised:
        encode(torch.ones(4, length), fmt, name="w")
    assert "16 bits" in raised.value.hint


@pytest.mark.parametrize("case", ["shape_4x24_bf16", "shape_4x40_fp32"])
def test_golden_shapes_that_nvfp4_refuses(case: str) -> None:
    with pytest.raises(FormatError, match="not a multiple"):
        encode(golden.source(case), NVFP4)


@pytest.mark.parametrize("name", ["fp8-block128", "fp8-e5m2-block128"])
@pytest.mark.parametrize("shape", [(128,), (2, 128, 128)], ids=str)
def test_tiles_need_a_matrix(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError, match="128x128 tiles takes a 2-D weight"):
        encode(torch.ones(shape), FORMATS[name])


@pytest.mark.parametrize("name", ["fp8", "fp8-channel", "fp8-block128"])
def test_fp8_takes_any_length(name: str) -> None:
    x = build("normal", (3, 5), 0)
    assert decode(encode(x, FORMATS[name])).shape == x.shape
