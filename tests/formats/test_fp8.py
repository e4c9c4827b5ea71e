"""FP8 with fp32 scales."""

import pytest
import torch
from torch import Tensor

from blockscale.formats.fp8 import scale_from_amax, tile_amax
from blockscale.formats.spec import E4M3, FORMATS, FP8, FP8_BLOCK128, FP8_CHANNEL, Format
from blockscale.formats.tensor import decode, encode

from . import golden
from .exact import magnitudes

FP32_CASES = ["normal_fp32", "huge_1e4_fp32", "tiny_1e-8_fp32"]
HALF_CASES = ["normal_bf16", "normal_fp16", "student_t3_bf16"]
CT_FILES = {
    "fp8_compressed_tensors_FP8_tensor": FP8,
    "fp8_compressed_tensors_FP8_DYNAMIC_channel": FP8_CHANNEL,
}
ct_files = pytest.mark.parametrize(("file", "fmt"), CT_FILES.items(), ids=["tensor", "channel"])


def as_bytes(t: Tensor) -> Tensor:
    return t.view(torch.uint8)


def distance_to_nearest(x: Tensor, scale: Tensor) -> Tensor:
    """float64: how far each |x| lies from the nearest E4M3 value times its scale."""
    return (x.double().abs().unsqueeze(-1) - magnitudes(E4M3) * scale.double().unsqueeze(-1)).abs().amin(-1)


def distance(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """float64: how far each x lies from the value of its code."""
    return (x.double() - codes.double() * scale.double()).abs()


def test_the_vectors_are_these_cases() -> None:
    for file in (*CT_FILES, "fp8_modelopt_per_tensor"):
        assert golden.cases(file) == sorted([*FP32_CASES, *HALF_CASES, "all_zero_fp32"])


@pytest.mark.parametrize("case", FP32_CASES + HALF_CASES)
def test_scale_of_model_optimizer(case: str) -> None:
    q = encode(golden.source(case), FP8)
    assert q.block_scale.dtype == torch.float32
    assert torch.equal(q.block_scale, golden.load("fp8_modelopt_per_tensor")[f"{case}/weight_scale"])


@pytest.mark.parametrize("case", FP32_CASES)
def test_bytes_of_model_optimizer(case: str) -> None:
    q = encode(golden.source(case), FP8)
    assert torch.equal(as_bytes(q.packed), as_bytes(golden.load("fp8_modelopt_per_tensor")[f"{case}/weight"]))


@pytest.mark.parametrize("case", HALF_CASES)
def test_model_optimizer_rounds_the_quotient_of_16_bit_weights_twice(case: str) -> None:
    """A 16-bit tensor over a 0-d fp32 scale stays 16-bit in torch, then becomes E4M3. We divide in fp32."""
    x, theirs = golden.source(case), golden.load("fp8_modelopt_per_tensor")[f"{case}/weight"]
    q = encode(x, FP8)
    twice = (x / q.block_scale).clamp(-448, 448)
    assert twice.dtype == x.dtype
    assert torch.equal(as_bytes(twice.to(torch.float8_e4m3fn)), as_bytes(theirs))  # explains every byte of theirs

    differs = as_bytes(q.packed) != as_bytes(theirs)
    assert 0 < differs.sum() < 0.05 * x.numel()
    nearest = distance_to_nearest(x, q.block_scale)
    slack = x.double().abs() * 2.0**-23  # our quotient's own rounding
    assert (distance(x, q.packed, q.block_scale) - nearest <= slack).all()
    assert (distance(x, theirs, q.block_scale)[differs] >= distance(x, q.packed, q.block_scale)[differs]).all()


@ct_files
@pytest.mark.parametrize("case", FP32_CASES)
def test_bytes_of_compressed_tensors(file: str, fmt: Format, case: str) -> None:
    theirs, q = golden.load(file), encode(golden.source(case), fmt)
    assert torch.equal(q.block_scale.reshape(-1), theirs[f"{case}/weight_scale"].reshape(-1))
    assert torch.equal(as_bytes(q.packed), as_bytes(theirs[f"{case}/weight"]))


@ct_files
@pytest.mark.parametrize("case", HALF_CASES)
def test_compressed_tensors_works_in_the_dtype_of_the_weight(file: str, fmt: Format, case: str) -> None:
    """Its scale is ours rounded to the weight's dtype, and its quotient is rounded to that, too."""
    x, theirs = golden.source(case), golden.load(file)
    q = encode(x, fmt)
    scale = theirs[f"{case}/weight_scale"]
    assert scale.dtype == x.dtype
    assert torch.equal(q.block_scale.to(x.dtype).reshape(-1), scale.reshape(-1))
    twice = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(as_bytes(twice), as_bytes(theirs[f"{case}/weight"]))
    # given the same scale, ours are the nearest codes
    q = encode(x, fmt, block_scale=scale.float())
    slack = x.double().abs() * 2.0**-23
    assert (distance(x, q.packed, scale) - distance_to_nearest(x, scale) <= slack).all()


def test_zero_tensor_has_scale_one() -> None:
    for fmt in (f for name, f in FORMATS.items() if name.startswith("fp8")):
        q = encode(golden.source("all_zero_fp32"), fmt)
        assert (q.block_scale == 1).all()
        assert not as_bytes(q.packed).any()
    # what it is not: Model Optimizer stores a scale of 0, compressed-tensors 2^-23
    assert golden.load("fp8_modelopt_per_tensor")["all_zero_fp32/weight_scale"] == 0
    assert (golden.load("fp8_compressed_tensors_FP8_tensor")["all_zero_fp32/weight_scale"] == 2.0**-23).all()


def test_scale_stays_normal() -> None:
    scale = scale_from_amax(torch.tensor([1e-45, 1e-38, 448.0, 0.0]), FP8)
    tiny = torch.finfo(torch.float32).tiny
    assert scale.tolist() == [tiny, tiny, 1.0, 1.0]
    assert (1 / scale).isfinite().all()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("fp8", ()),
        ("fp8-channel", (130, 1)),
        ("fp8-token", (130, 1)),
        ("fp8-block128", (2, 3)),
        ("fp8-e5m2", ()),
        ("fp8-e5m2-block128", (2, 3)),
    ],
)
def test_shape_of_the_scales(name: str, shape: tuple[int, ...]) -> None:
    q = encode(torch.randn(130, 257, generator=torch.Generator().manual_seed(0)), FORMATS[name])
    assert tuple(q.block_scale.shape) == shape
    assert q.packed.dtype == (torch.float8_e5m2 if "e5m2" in name else torch.float8_e4m3fn)


def test_tiles_at_the_edges() -> None:
    x = torch.ones(130, 257)
    x[129, 0], x[0, 256], x[129, 256] = -2.0, 3.0, 5.0
    expected = torch.tensor([[1.0, 1.0, 3.0], [2.0, 1.0, 5.0]])
    assert torch.equal(tile_amax(x, 128), expected)
    q = encode(x, FP8_BLOCK128)
    assert torch.equal(q.block_scale, expected / 448)
    # each element is divided by its own tile's scale: a tile's amax has the largest code
    assert q.packed[129, 0] == -448
    assert q.packed[0, 256] == 448
    assert q.packed[129, 256] == 448
    assert q.packed[129, 255] == 448
    assert q.packed[129, 1] == 224
    assert (q.packed[:128, :256].float() == 448).all()
    assert (q.packed[:128, 256].float()[1:] == 144).all()  # 149.3, between 144 and 160
    assert torch.equal(decode(q)[128:, 1:128], torch.ones(2, 127))


def test_token_and_channel_are_rows() -> None:
    x = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(1))
    whole = encode(x, FORMATS["fp8-token"])
    assert tuple(whole.block_scale.shape) == (3, 5, 1)
    row = encode(x[1, 2], FORMATS["fp8-channel"])
    assert torch.equal(whole.block_scale[1, 2], row.block_scale)
    assert torch.equal(as_bytes(whole.packed[1, 2]), as_bytes(row.packed))
