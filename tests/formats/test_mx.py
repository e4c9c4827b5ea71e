"""The MX formats: scale rules, peers' bytes, exact rounding."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockscale.formats import mx
from blockscale.formats.mx import ScaleRule
from blockscale.formats.packing import unpack_nibbles, unpack_sixes
from blockscale.formats.spec import E2M1, FORMATS, MXFP4, Format, Minifloat
from blockscale.formats.tensor import QuantizedTensor, decode, encode

from . import golden
from .exact import magnitudes, nearest_codes
from .strategies import tensors

MX_FORMATS = [fmt for name, fmt in FORMATS.items() if name.startswith("mx")]
each_format = pytest.mark.parametrize("fmt", MX_FORMATS, ids=lambda f: f.name)
each_rule = pytest.mark.parametrize("rule", ScaleRule, ids=lambda r: r.value)
FP32_MAX = torch.finfo(torch.float32).max

# file -> (rule, name of the codes, name of the scales, cases whose bytes are not ours)
TORCHAO_SIGNED_ZEROS = {"mixed_signed_zero_fp32", "neg_zero_fp32", "tiny_1e-43_fp32"}
PEERS = {
    "mxfp4_torchao_even": (ScaleRule.EVEN, "packed", "scale_e8m0", TORCHAO_SIGNED_ZEROS | {"tiny_1e-38_fp32"}),
    "mxfp4_torchao_floor": (ScaleRule.FLOOR, "packed", "scale_e8m0", TORCHAO_SIGNED_ZEROS | {"tiny_1e-38_fp32"}),
    "mxfp4_torchao_rceil": (ScaleRule.FIT, "packed", "scale_e8m0", TORCHAO_SIGNED_ZEROS | {"tiny_1e-38_fp32"}),
    "mxfp4_compressed_tensors": (
        ScaleRule.EVEN,
        "weight_packed",
        "weight_scale",
        {"huge_maxfinite_fp32", "tiny_subnormal_fp16"},
    ),
}
SAME = [(file, case) for file, (*_, others) in PEERS.items() for case in golden.cases(file) if case not in others]
MXFP4_INPUTS = [case for case in golden.cases("inputs") if golden.source(case).shape[-1] % 32 == 0]


def scale_by_definition(amax: float, element: Minifloat, rule: ScaleRule) -> int:
    """The E8M0 code for a block of that amax, from Python floats (fp32 numbers and their products are exact there)."""
    if amax == 0:
        return 0
    if rule is ScaleRule.FIT:
        exponent = -200
        while element.max * 2.0**exponent < amax:
            exponent += 1
    else:
        binade = math.frexp(amax)[1] - 1
        if rule is ScaleRule.EVEN:
            unit = 2.0 ** (binade - element.mantissa_bits)
            amax = math.floor(amax / unit + 0.5) * unit
        exponent = math.frexp(amax)[1] - 1 - element.max_exponent
    return max(-127, min(127, exponent)) + 127


def codes_of(q: QuantizedTensor) -> Tensor:
    """uint8 codes, one per byte."""
    bits = q.format.element.bits
    if bits == 4:
        return unpack_nibbles(q.packed)
    return unpack_sixes(q.packed) if bits == 6 else q.packed.view(torch.uint8)


def assert_exact(x: Tensor, q: QuantizedTensor, rule: ScaleRule) -> None:
    """Scales by definition, codes by exhaustive search, values by float64 products."""
    element = q.format.element
    assert isinstance(element, Minifloat)
    amax = x.double().abs().unflatten(-1, (-1, 32)).amax(-1)
    scales = [scale_by_definition(a, element, rule) for a in amax.flatten().tolist()]
    assert q.block_scale.flatten().tolist() == scales
    step = 2.0 ** (q.block_scale.double() - 127).repeat_interleave(32, -1)
    codes = codes_of(q)
    assert torch.equal(codes, nearest_codes(x, element, step))
    table = magnitudes(element)
    sign = 1.0 - 2.0 * (codes >> (element.bits - 1)).double()
    value = sign * table[(codes & (2 ** (element.bits - 1) - 1)).long()] * step
    assert torch.equal(decode(q), value.float())


@pytest.mark.parametrize(("file", "case"), SAME, ids=lambda value: str(value))
def test_bytes_of_the_peers(file: str, case: str) -> None:
    rule, packed, scale, _ = PEERS[file]
    theirs = golden.load(file)
    q = encode(golden.source(case), MXFP4, scale_rule=rule)
    assert torch.equal(q.block_scale, theirs[f"{case}/{scale}"])
    assert torch.equal(q.packed, theirs[f"{case}/{packed}"])


@each_rule
@pytest.mark.parametrize("case", MXFP4_INPUTS)
def test_our_bytes_are_exact_on_every_case(case: str, rule: ScaleRule) -> None:
    """Also where a peer's are not: this is what the exceptions below rest on."""
    x = golden.source(case)
    assert_exact(x, encode(x, MXFP4, scale_rule=rule), rule)


@pytest.mark.parametrize("case", sorted(TORCHAO_SIGNED_ZEROS))
@pytest.mark.parametrize("file", [file for file in PEERS if "torchao" in file])
def test_torchao_keeps_the_sign_of_zero(file: str, case: str) -> None:
    rule, packed, scale, _ = PEERS[file]
    theirs, x = golden.load(file), golden.source(case)
    q = encode(x, MXFP4, scale_rule=rule)
    assert torch.equal(q.block_scale, theirs[f"{case}/{scale}"])
    ours, other = unpack_nibbles(q.packed), unpack_nibbles(theirs[f"{case}/{packed}"])
    differs = ours != other
    assert torch.equal(differs, (x == 0) & torch.signbit(x))
    assert (ours[differs] == 0).all()
    assert (other[differs] == 8).all()


@pytest.mark.parametrize(
    ("file", "case"),
    [
        # a scale of 2^-127 is subnormal; torchao lifts it to 2^-126 (or flushes its reciprocal) before it divides
        ("mxfp4_torchao_even", "tiny_1e-38_fp32"),
        ("mxfp4_torchao_floor", "tiny_1e-38_fp32"),
        ("mxfp4_torchao_rceil", "tiny_1e-38_fp32"),
        # rounding amax up carries it out of fp32, and the exponent of Inf becomes 127, a scale of 1
        ("mxfp4_compressed_tensors", "huge_maxfinite_fp32"),
        # the scale is formed in fp16, which 2^-20 and less leave, and becomes 1
        ("mxfp4_compressed_tensors", "tiny_subnormal_fp16"),
    ],
)
def test_peers_that_leave_the_range_of_their_arithmetic(file: str, case: str) -> None:
    rule, packed, scale, _ = PEERS[file]
    theirs, x = golden.load(file), golden.source(case)
    q = encode(x, MXFP4, scale_rule=rule)
    other = QuantizedTensor(MXFP4, theirs[f"{case}/{packed}"], theirs[f"{case}/{scale}"], None, q.shape, q.dtype)

    def error(quantized: QuantizedTensor) -> Tensor:
        step = 2.0 ** (quantized.block_scale.double() - 127).repeat_interleave(32, -1)
        value = magnitudes(E2M1)[(codes_of(quantized) & 7).long()] * step  # float64: nothing overflows
        return (x.double().abs() - value).abs()

    assert not torch.equal(q.packed, other.packed)
    assert (error(q) <= error(other)).all()
    assert error(q).sum() < error(other).sum() / 2


@pytest.mark.parametrize("case", golden.cases("mxfp4_modelopt"))
def test_model_optimizer_but_for_its_ties_and_zeros(case: str) -> None:
    """Its scales are FIT's. Its MXFP4 codes take ties toward zero and write zero as -0; ours are half to even and 0."""
    theirs, x = golden.load("mxfp4_modelopt"), golden.source(case)
    q = encode(x, MXFP4, scale_rule=ScaleRule.FIT)
    assert torch.equal(q.block_scale, theirs[f"{case}/weight_scale_e8m0"])
    ours, other = unpack_nibbles(q.packed), unpack_nibbles(theirs[f"{case}/packed"])
    step = 2.0 ** (q.block_scale.double() - 127).repeat_interleave(32, -1)
    y = x.double().abs() / step
    toward_zero = torch.isin(y, torch.tensor([0.75, 1.75, 3.5], dtype=torch.float64))  # where even lies above
    assert torch.equal(other[toward_zero] % 8, ours[toward_zero] % 8 - 1)
    assert torch.equal(other[~toward_zero] % 8, ours[~toward_zero] % 8)
    assert (other[x == 0] == 8).all()
    assert (ours[x == 0] == 0).all()


def test_model_optimizer_cases_hold_ties() -> None:
    theirs = golden.load("mxfp4_modelopt")["normal_bf16/packed"]
    assert (encode(golden.source("normal_bf16"), MXFP4, scale_rule=ScaleRule.FIT).packed != theirs).sum() > 10


def test_gpt_oss_blocks() -> None:
    vectors = golden.load("layouts")
    blocks, scales = vectors["gpt_oss/gate_up_proj_blocks"], vectors["gpt_oss/gate_up_proj_scales"]  # [E, N, K/32, 16]
    q = QuantizedTensor(MXFP4, blocks.flatten(-2), scales, None, (2, 8, 96), torch.bfloat16)
    assert torch.equal(q.dequantize().transpose(1, 2), vectors["gpt_oss/dequant_bf16_transformers"])


@pytest.mark.parametrize("case", golden.cases("mxfp4_compressed_tensors"))
def test_decodes_compressed_tensors(case: str) -> None:
    theirs = golden.load("mxfp4_compressed_tensors")
    packed, scale = theirs[f"{case}/weight_packed"], theirs[f"{case}/weight_scale"]
    q = QuantizedTensor(MXFP4, packed, scale, None, tuple(golden.source(case).shape), torch.bfloat16)
    assert torch.equal(q.dequantize(), theirs[f"{case}/dequant_bf16"])


def test_every_scale_code() -> None:
    values = mx.scale_values(torch.arange(256, dtype=torch.uint8))
    assert values[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert values[255].isnan()


@each_format
@each_rule
def test_scale_rule_at_every_boundary(fmt: Format, rule: ScaleRule) -> None:
    element = fmt.element
    assert isinstance(element, Minifloat)
    m = element.mantissa_bits
    turns = [1.0, math.frexp(element.max)[0] * 2, 2 - 2.0 ** -(m + 1), 2 - 2.0**-m, 1.5]
    exponents = [-149, -148, -140, -127, -126, -125, -30, -1, 0, 1, 30, 126, 127]
    at = torch.tensor([t * 2.0**e for t in turns for e in exponents], dtype=torch.float64).float()
    infinity = torch.tensor(torch.inf)
    amax = torch.cat([at, torch.nextafter(at, infinity), torch.nextafter(at, -infinity), torch.tensor([0.0, FP32_MAX])])
    amax = amax[amax.isfinite()]
    expected = [scale_by_definition(a, element, rule) for a in amax.double().tolist()]
    assert mx.scale_from_amax(amax, element, rule).tolist() == expected


@each_format
@settings(max_examples=40, deadline=None)
@given(amax=st.floats(0, FP32_MAX, width=32))
def test_fit_never_saturates_and_is_the_smallest_that_does_not(fmt: Format, amax: float) -> None:
    element = fmt.element
    assert isinstance(element, Minifloat)
    code = int(mx.scale_from_amax(torch.tensor(amax), element, ScaleRule.FIT))
    assert amax <= element.max * 2.0 ** (code - 127)
    assert code == 0 or amax > element.max * 2.0 ** (code - 128)


@each_format
@each_rule
@settings(max_examples=15, deadline=None)
@given(x=tensors(last=64))
def test_scales_codes_and_values_are_exact(fmt: Format, rule: ScaleRule, x: Tensor) -> None:
    assert_exact(x, encode(x, fmt, scale_rule=rule), rule)


@each_format
def test_zero_block_gets_the_smallest_scale_and_zero_codes(fmt: Format) -> None:
    assert isinstance(fmt.element, Minifloat)
    x = torch.zeros(2, 64)
    x[0, :32] = 1.0
    x[1] = -0.0
    q = encode(x, fmt)
    assert q.block_scale[0, 0] == 127 - fmt.element.max_exponent
    assert q.block_scale.flatten()[1:].tolist() == [0, 0, 0]
    assert not codes_of(q)[0, 32:].any()
    assert not codes_of(q)[1].any()


def test_one_block_by_hand() -> None:
    # amax 13 = 1.625 * 2^3. floor: 2^(3-2) = 2; even: 1.625 rounds to 1.5, so 2 as well; fit: 13/6 needs 4.
    x = torch.zeros(32)
    x[:4] = torch.tensor([13.0, -3.0, 0.9, 5.0])
    scales = {rule: int(encode(x, MXFP4, scale_rule=rule).block_scale) - 127 for rule in ScaleRule}
    assert scales == {ScaleRule.FLOOR: 1, ScaleRule.EVEN: 1, ScaleRule.FIT: 2}
    assert decode(encode(x, MXFP4))[:4].tolist() == [12.0, -3.0, 1.0, 4.0]
    assert decode(encode(x, MXFP4, scale_rule=ScaleRule.FIT))[:4].tolist() == [12.0, -4.0, 0.0, 4.0]
