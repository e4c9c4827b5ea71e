"""The grouped kernels in Triton's interpreter, against float64 and the formats' own decoding."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.spec import MXFP4, NVFP4, Format
from blockscale.kernels.experts import GPT_OSS, SILU, GatedActivation
from tests.kernels.interpreter import interpreted
from tests.kernels.moe_cases import Layer, assert_close, make_choices, make_layer, reference

moe = interpreted("blockscale.kernels.triton.moe")
SMALL = moe.Tiles(32, 16, 64, 4, 3)
LARGE = moe.Tiles(64, 32, 128, 4, 3)


def _run(layer: Layer, x: Tensor, ids: Tensor, weights: Tensor, tiles: Any = SMALL) -> Tensor:
    return moe.moe(
        x,
        ids,
        weights,
        layer.gate_up,
        layer.down,
        activation=layer.activation,
        gate_up_bias=layer.gate_up_bias,
        down_bias=layer.down_bias,
        tiles=(tiles, tiles),
    )


def _x(num_tokens: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(num_tokens, k, generator=torch.Generator().manual_seed(k)).to(dtype)


@pytest.mark.parametrize("tiles", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("kind", ["balanced", "skewed", "one", "repeated", "holes"])
def test_layer_equals_float64(kind: str, tiles: Any) -> None:
    layer = make_layer(4, 96, 48, 24, NVFP4)
    x, (ids, weights) = _x(11, 96), make_choices(11, 2, 4, kind)
    assert_close(_run(layer, x, ids, weights, tiles), layer, x, ids, weights)


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [SILU, GPT_OSS, GatedActivation(is_interleaved=True)])
def test_formats_dtypes_and_activations(fmt: Format, dtype: torch.dtype, activation: GatedActivation) -> None:
    layer = make_layer(4, 64, 32, 24, fmt, activation=activation, has_bias=True, dtype=dtype)
    x, (ids, weights) = _x(5, 64, dtype), make_choices(5, 3, 4)
    assert_close(_run(layer, x * 4, ids, weights), layer, x * 4, ids, weights)


@pytest.mark.parametrize(("k", "intermediate", "n"), [(16, 16, 1), (80, 112, 33), (144, 16, 70)])
def test_ragged_sizes(k: int, intermediate: int, n: int) -> None:
    layer = make_layer(3, k, intermediate, n, NVFP4)
    x, (ids, weights) = _x(4, k), make_choices(4, 1, 3)
    assert_close(_run(layer, x, ids, weights), layer, x, ids, weights)
    assert_close(_run(layer, x, ids, weights, LARGE), layer, x, ids, weights)


def test_gate_and_up_with_global_scales_of_their_own() -> None:
    layer = make_layer(3, 32, 32, 16, NVFP4, num_scales=2)
    assert layer.gate_up.global_scale.shape == (3, 2)
    x, (ids, weights) = _x(3, 32), make_choices(3, 2, 3)
    assert_close(_run(layer, x, ids, weights), layer, x, ids, weights)


def test_many_tokens_take_the_chunked_sort_and_sums_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(3, 32, 16, 16, NVFP4)
    x, (ids, weights) = _x(135, 32), make_choices(135, 2, 3, "skewed")
    exact = _run(layer, x, ids, weights, LARGE)
    assert_close(exact, layer, x, ids, weights)
    monkeypatch.setattr(moe, "_FP32_PAIRS", 0)
    rounded = _run(layer, x, ids, weights, LARGE)
    assert not torch.equal(rounded, exact)
    error = (rounded.float() - exact.float()).abs()
    assert error.max() <= 2**-7 * exact.float().abs().max()


def test_operands_of_any_stride() -> None:
    layer = make_layer(3, 32, 16, 16, NVFP4)
    x, (ids, weights) = _x(4, 32), make_choices(4, 2, 3)
    expected = _run(layer, x, ids, weights)
    wide_x = torch.full((4, 100), torch.nan, dtype=x.dtype)
    wide_x[:, 7:39] = x
    columns = torch.full((2, 4), torch.nan)
    columns.T.copy_(weights)
    assert torch.equal(_run(layer, wide_x[:, 7:39], ids.int(), columns.T), expected)
    assert torch.equal(_run(layer, x.T.contiguous().T, ids.T.contiguous().T, weights), expected)


def test_operands_that_are_exact_give_exact_sums() -> None:
    """Whole numbers and an activation that is relu(gate) * up for them: no product or sum is rounded, up to y."""
    layer = make_layer(2, 64, 32, 16, NVFP4, activation=GatedActivation(alpha=100.0))
    one = 0x38  # in E4M3
    gate_up = replace(
        layer.gate_up,
        packed=torch.where(layer.gate_up.packed % 3 == 0, 0x42, 0xA0).byte(),  # codes 2, 4: 1 and 2; 0, 10: 0 and -1
        block_scale=torch.full_like(layer.gate_up.block_scale, one),
        global_scale=torch.ones(2),
    )
    down = replace(
        layer.down,
        packed=torch.where(layer.down.packed % 3 == 0, 0x24, 0x2A).byte(),
        block_scale=torch.full_like(layer.down.block_scale, one),
        global_scale=torch.full((2,), 0.5),
    )
    layer = replace(layer, gate_up=gate_up, down=down)
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    x[:, [3, 17, 40]] = 1.0
    ids, weights = torch.tensor([[0], [1], [1]]), torch.ones(3, 1)
    expected, _ = reference(layer, x, ids, weights)
    assert expected.abs().max() > 0
    assert torch.equal(_run(layer, x, ids, weights).double(), expected.bfloat16().double())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_token_stays_alone(bad: float) -> None:
    layer = make_layer(3, 64, 32, 16, NVFP4)
    x, (ids, weights) = _x(6, 64), make_choices(6, 2, 3, "one")
    clean = _run(layer, x, ids, weights)
    x[2, 5] = bad
    y = _run(layer, x, ids, weights)
    assert torch.isnan(y[2]).all()
    rest = [0, 1, 3, 4, 5]
    assert torch.equal(y[rest], clean[rest])


def test_scales_of_nan_and_zero_do_what_the_format_says() -> None:
    layer = make_layer(2, 32, 16, 16, NVFP4)
    scale = layer.down.block_scale.clone()
    scale[0, 3, 0], scale[1, 4, 0] = 0x7F, 0
    layer = replace(layer, down=replace(layer.down, block_scale=scale))
    x, weights = _x(2, 32), torch.ones(2, 1)
    y = _run(layer, x, torch.tensor([[0], [1]]), weights)
    assert torch.isnan(y[0]).nonzero().flatten().tolist() == [3]
    assert y[1, 4] == 0
    assert torch.isfinite(y[1]).all()


def test_nothing_is_read_past_the_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that begin as NaN: what was not written would be seen, and a choice without an expert adds nothing."""
    empty = torch.empty

    def poisoned(*size: object, **options: object) -> Tensor:
        made = empty(*size, **options)  # type: ignore[call-overload]
        return made.fill_(torch.nan if made.is_floating_point() else 7)

    monkeypatch.setattr(torch, "empty", poisoned)
    layer = make_layer(4, 48, 16, 24, NVFP4)
    x, (ids, weights) = _x(7, 48), make_choices(7, 2, 4, "holes")
    y = _run(layer, x, ids, weights)
    assert_close(y, layer, x, ids, weights)
    assert (y[-1] == 0).all()


def test_no_tokens() -> None:
    layer = make_layer(2, 32, 16, 16, NVFP4)
    y = _run(layer, _x(0, 32), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    assert y.shape == (0, 16)


def test_operands_that_do_not_fit_are_named() -> None:
    layer = make_layer(2, 32, 16, 16, NVFP4)
    x, (ids, weights) = _x(2, 32), make_choices(2, 2, 2)
    cases = {
        "x is": (x.float(), ids, weights, layer),
        "the last dimension of x|x must have shape": (_x(2, 48), ids, weights, layer),
        "topk_ids": (x, ids.float(), weights, layer),
        "topk_weights": (x, ids, weights[:1], layer),
        "down is": (x, ids, weights, replace(layer, down=make_layer(2, 32, 32, 16, NVFP4).down)),
        "global_scale": (x, ids, weights, replace(layer, down=replace(layer.down, global_scale=torch.ones(3)))),
        "gate_up_bias": (x, ids, weights, replace(layer, gate_up_bias=torch.zeros(2, 16))),
    }
    for words, (a, b, c, where) in cases.items():
        with pytest.raises(FormatError) as caught:
            _run(where, a, b, c)
        assert any(word in str(caught.value) + caught.value.hint for word in words.split("|")), words
        assert caught.value.hint
