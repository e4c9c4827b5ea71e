"""One weight, a slice of rows at a time: the same bytes as the whole at once, and the right sums."""

import math

import pytest
import torch
from torch import Tensor, nn

from blockscale.errors import FormatError, NonFiniteError
from blockscale.formats.spec import FORMATS, NVFP4, Format, Granularity
from blockscale.formats.tensor import QuantizedTensor, decode, encode
from blockscale.quantization import weight as weight_module
from blockscale.quantization.weight import ScaleMethod, WeightError, quantize_tensor, quantize_weight

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# one row, rows that leave a rest, several leading dimensions, a row longer than a slice
SHAPES = ((1, 128), (7, 256), (130, 384), (3, 5, 128), (2, 3, 5, 128), (128,))


def normal(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.03).to(dtype)


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_module, "_SLICE_ELEMENTS_CPU", 512)


def parts(q: QuantizedTensor) -> list[Tensor]:
    tensors = [q.packed.view(torch.uint8), q.block_scale]
    tensors = tensors if q.global_scale is None else [*tensors, q.global_scale]
    return [t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in tensors]


def assert_same(a: QuantizedTensor, b: QuantizedTensor) -> None:
    assert (a.format, a.shape, a.dtype) == (b.format, b.shape, b.dtype)
    for x, y in zip(parts(a), parts(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_slices_give_the_bytes_of_the_whole(fmt: Format, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = normal(shape, dtype)
    if fmt.granularity is Granularity.TILE and len(shape) != 2:
        with pytest.raises(FormatError, match="2-D"):
            quantize_tensor(x, fmt)
        return
    assert_same(quantize_tensor(x, fmt), encode(x, fmt))


def test_tiles_of_odd_sizes() -> None:
    for shape in ((1, 1), (129, 127), (300, 200), (127, 513)):
        x = normal(shape)
        assert_same(quantize_tensor(x, "fp8-block128"), encode(x, FORMATS["fp8-block128"]))


@pytest.mark.parametrize("method", ScaleMethod)
@pytest.mark.parametrize("shape", SHAPES)
def test_slices_do_not_change_a_method(
    shape: tuple[int, ...], method: ScaleMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = normal(shape)
    sliced = quantize_tensor(x, scale=method)
    monkeypatch.setattr(weight_module, "_SLICE_ELEMENTS_CPU", 1 << 30)
    assert_same(sliced, quantize_tensor(x, scale=method.value))


def test_better_methods_err_less() -> None:
    x = normal((64, 256))
    sums = [quantize_weight(x, NVFP4, method, None, "x")[1].squared_error for method in ScaleMethod]
    amax, sweep, four_over_six = sums
    assert sweep < four_over_six < amax


@pytest.mark.parametrize("magnitude", [1.0, 1e-25, 1e25])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "fp8", "fp8-channel", "fp8-block128", "int4-g16"])
def test_error_sums(name: str, magnitude: float) -> None:
    x = normal((130, 384), torch.float32) * magnitude
    q, error = quantize_weight(x, FORMATS[name], ScaleMethod.AMAX, None, "x")
    difference = decode(q).double() - x.double()
    assert error.squared_error == pytest.approx(difference.square().sum().item(), rel=1e-5)
    assert error.squares == pytest.approx(x.double().square().sum().item(), rel=1e-5)
    sqnr = -10 * math.log10(error.squared_error / error.squares)
    assert error.sqnr_db == pytest.approx(sqnr)
    assert 15 < sqnr < 50


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_source_is_left_alone(dtype: torch.dtype) -> None:
    x = normal((130, 128), dtype)
    before = x.clone()
    for name in FORMATS:
        quantize_tensor(x, name)
        assert torch.equal(x, before)


def test_sqnr_of_exact_and_of_zero() -> None:
    assert WeightError(0.0, 1.0).sqnr_db == math.inf
    assert WeightError(0.0, 0.0).sqnr_db == math.inf
    assert WeightError(1.0, 0.0).sqnr_db == -math.inf
    assert WeightError(1.0, 100.0).sqnr_db == pytest.approx(20)


def test_a_stack_shares_one_global_scale() -> None:
    x = normal((4, 8, 64))
    x[2] *= 10
    q = quantize_tensor(x)
    assert (q.packed.shape, q.block_scale.shape) == ((4, 8, 32), (4, 8, 4))
    assert q.global_scale is not None
    assert torch.equal(q.global_scale, x.abs().amax().float() / 2688)
    for expert in range(4):
        alone = quantize_tensor(x[expert], global_scale=q.global_scale)
        assert torch.equal(alone.packed, q.packed[expert])
        assert torch.equal(alone.block_scale.view(torch.uint8), q.block_scale[expert].view(torch.uint8))


def test_a_shared_global_scale_is_used_as_given() -> None:
    x = normal((8, 64))
    shared = torch.tensor(0.001)
    q = quantize_tensor(x, scale="sweep", global_scale=shared)
    assert torch.equal(q.global_scale, shared)
    assert torch.equal(quantize_tensor(x, global_scale=shared).packed, encode(x, NVFP4, global_scale=shared).packed)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_global_scale_that_no_engine_can_use(value: float) -> None:
    with pytest.raises(FormatError, match="global scale"):
        quantize_tensor(normal((1, 16)), global_scale=torch.tensor(value))


def test_all_zero() -> None:
    for method in ScaleMethod:
        q, error = quantize_weight(torch.zeros(4, 32), NVFP4, method, None, "x")
        assert q.global_scale == 1
        assert (q.block_scale.float() == 1).all()
        assert not q.packed.any()
        assert error == WeightError(0.0, 0.0)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_names_tensor_and_position(name: str, bad: float) -> None:
    x = normal((40, 128))
    x[33, 77] = bad
    with pytest.raises(NonFiniteError, match=r"layers\.3\.q_proj: .* at \[33, 77\]"):
        quantize_tensor(x, name, name="layers.3.q_proj")


def test_a_parameter_leaves_no_graph() -> None:
    x = nn.Parameter(normal((4, 64), torch.float32))
    for method in ScaleMethod:
        q = quantize_tensor(x, scale=method)
        assert not any(t.requires_grad for t in parts(q))
        assert_same(q, quantize_tensor(x.detach(), scale=method))


def test_views_and_transposes() -> None:
    x = normal((64, 48))
    assert_same(quantize_tensor(x.T), quantize_tensor(x.T.contiguous()))
    assert_same(quantize_tensor(x[:, 16:32]), quantize_tensor(x[:, 16:32].contiguous()))


def test_refusals() -> None:
    with pytest.raises(FormatError, match=r"60 is not a multiple of nvfp4's block of 16") as error:
        quantize_tensor(normal((512, 60)))
    assert error.value.hint
    with pytest.raises(FormatError, match="float64"):
        quantize_tensor(torch.ones(2, 16, dtype=torch.float64))
    with pytest.raises(FormatError, match="empty"):
        quantize_tensor(torch.empty(0, 16))
    with pytest.raises(FormatError, match="unknown scale 'mse'") as error:
        quantize_tensor(normal((1, 16)), scale="mse")
    assert "four_over_six" in error.value.hint
    with pytest.raises(FormatError, match="unknown format 'nvfp5'"):
        quantize_tensor(normal((1, 16)), "nvfp5")
    with pytest.raises(FormatError, match="'sweep' needs an NVFP4 format, got mxfp4"):
        quantize_tensor(normal((1, 32)), "mxfp4", scale="sweep")
