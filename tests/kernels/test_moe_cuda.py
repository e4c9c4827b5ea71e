"""The CUDA kernels for a few tokens: their source run on the host against float64, and compiled for every target."""

import ctypes
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.minifloat import decode_table
from blockscale.formats.spec import E2M1, E4M3, MXFP4, NVFP4
from blockscale.kernels.cuda import moe
from blockscale.kernels.cuda.moe import Mode, Variant, Variants
from blockscale.kernels.device import Device
from blockscale.kernels.experts import GPT_OSS, SILU
from blockscale.kernels.nvrtc import Program
from tests.kernels.compiled import compile_cuda, make_host_library
from tests.kernels.moe_cases import Layer, assert_close, make_choices, make_layer

NUM_SMS = 3  # of the machine that is played
SMALL = Variants(Variant(2, 1, 2, 2, 2), Variant(1, 1, 2, 2, 2), Variant(1, 1, 4, 1, 2))
DEEP = Variants(Variant(4, 2, 1, 1, 1), Variant(2, 3, 2, 1, 1), Variant(2, 2, 2, 2, 1))
BUILT = (
    (SMALL, torch.bfloat16, False),
    (SMALL, torch.float16, False),
    (SMALL, torch.bfloat16, True),
    (SMALL, torch.float16, True),
    (DEEP, torch.bfloat16, False),
)


def _names() -> list[str]:
    names = ["combine<0>", "combine<1>"]
    for variants, dtype, is_mxfp4 in BUILT:
        pairs = ((Mode.GATED, variants.gated), (Mode.DOWN, variants.down), (Mode.TOKEN, variants.token))
        names += [variant.name(dtype, is_mxfp4, mode) for mode, variant in pairs]
    return names


@cache
def _library(folder: Path) -> ctypes.CDLL:
    calls = "\n".join(
        f'extern "C" int kernel_{i}(const Arguments* a, int x, int y, int threads, int shared) {{\n'
        f"  return run_grid({{x, y}}, threads, shared, [=] {{ {name}(*a); }}); }}"
        for i, name in enumerate(_names())
    )
    host = Path(__file__).parent / "cuda_on_host.h"
    source = f"""#include "{host}"
#include "moe.cu"
{calls}
extern "C" void decode(int type, u32 word, u32* pairs) {{
  u32 (&out)[4] = *(u32 (*)[4])pairs;
  if (type == BF16) natural_codes<BF16>(word, out); else natural_codes<FP16>(word, out);
}}
extern "C" void scales(int type, u32 bytes, u32* pairs) {{
  u32 (&out)[2] = *(u32 (*)[2])pairs;
  if (type == BF16) natural_scales<BF16>(bytes, out); else natural_scales<FP16>(bytes, out);
}}
extern "C" void mx_factors(int type, u32 byte, u32* pairs) {{
  if (type == BF16) natural_mx_factors<BF16>(byte, pairs[0], pairs[1]);
  else natural_mx_factors<FP16>(byte, pairs[0], pairs[1]);
}}
"""
    return ctypes.CDLL(str(make_host_library(source, folder, flags=("-w", "-O1"))))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return _library(tmp_path_factory.mktemp("moe"))


def _run(
    library: ctypes.CDLL, layer: Layer, x: Tensor, ids: Tensor, weights: Tensor, variants: Variants, token_rows: int = 0
) -> Tensor:
    call = moe.make_call(
        x, ids, weights, layer.gate_up, layer.down, layer.activation, layer.gate_up_bias, layer.down_bias, token_rows
    )
    for buffer in (call.h, call.y, *([] if call.part is None else [call.part])):
        buffer.fill_(torch.nan)  # what is not written, or read before it is, would be seen
    for step in moe.plan(call, variants, NUM_SMS):
        function = library[f"kernel_{_names().index(step.kernel)}"]
        past = function(ctypes.byref(step.arguments), *step.grid[:2], step.threads, step.shared_bytes)
        assert past == 0, "wrote past its shared memory"
    return call.y


def _x(num_tokens: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(num_tokens, k, generator=torch.Generator().manual_seed(k)).to(dtype)


@pytest.mark.parametrize("token_rows", [0, 99], ids=["by expert", "by token"])
@pytest.mark.parametrize("kind", ["balanced", "skewed", "one", "repeated", "holes"])
def test_layer_equals_float64(library: ctypes.CDLL, kind: str, token_rows: int) -> None:
    layer = make_layer(6, 160, 64, 40, NVFP4)
    x, (ids, weights) = _x(18, 160), make_choices(18, 2, 6, kind)  # 36 pairs: more than a warp has lanes
    assert_close(_run(library, layer, x, ids, weights, SMALL, token_rows), layer, x, ids, weights)


@pytest.mark.parametrize("token_rows", [0, 99], ids=["by expert", "by token"])
@pytest.mark.parametrize("kind", ["balanced", "one", "repeated", "holes"])
def test_a_few_pairs_are_sorted_by_one_warp(library: ctypes.CDLL, kind: str, token_rows: int) -> None:
    layer = make_layer(40, 128, 32, 24, NVFP4)
    x, (ids, weights) = _x(4, 128), make_choices(4, 8, 40, kind)
    assert_close(_run(library, layer, x, ids.int(), weights, SMALL, token_rows), layer, x, ids, weights)


@pytest.mark.parametrize("token_rows", [0, 99], ids=["by expert", "by token"])
@pytest.mark.parametrize(("k", "intermediate", "n"), [(32, 32, 1), (416, 288, 33)])
def test_ragged_sizes_and_several_rounds(
    library: ctypes.CDLL, k: int, intermediate: int, n: int, token_rows: int
) -> None:
    layer = make_layer(3, k, intermediate, n, NVFP4, num_scales=2)
    x, (ids, weights) = _x(3, k), make_choices(3, 2, 3)
    for variants in (SMALL, DEEP):
        assert_close(_run(library, layer, x, ids, weights, variants, token_rows), layer, x, ids, weights)


@pytest.mark.parametrize("token_rows", [0, 99], ids=["by expert", "by token"])
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [SILU, GPT_OSS])
def test_formats_dtypes_biases_and_activations(
    library: ctypes.CDLL, fmt: object, dtype: torch.dtype, activation: object, token_rows: int
) -> None:
    layer = make_layer(4, 160, 64, 24, fmt, activation=activation, has_bias=True, dtype=dtype)  # type: ignore[arg-type]
    if activation is GPT_OSS:
        layer = replace(layer, gate_up_bias=layer.gate_up_bias.float(), down_bias=layer.down_bias.float())  # type: ignore[union-attr]
    x, (ids, weights) = _x(3, 160, dtype) * 4, make_choices(3, 3, 4)
    assert_close(_run(library, layer, x, ids, weights, SMALL, token_rows), layer, x, ids, weights)


def test_rows_and_choices_of_any_stride(library: ctypes.CDLL) -> None:
    layer = make_layer(3, 64, 32, 16, NVFP4)
    x, (ids, weights) = _x(4, 64), make_choices(4, 2, 3)
    expected = _run(library, layer, x, ids, weights, SMALL)
    wide = torch.full((4, 200), torch.nan, dtype=x.dtype)
    for first in (8, 9):  # rows at multiples of 16 bytes are read where they lie
        wide[:, first : first + 64] = x
        found = _run(library, layer, wide[:, first : first + 64], ids.T.contiguous().T, weights.bfloat16(), SMALL)
        same = _run(library, layer, x, ids, weights.bfloat16(), SMALL)
        assert torch.equal(found, same)
    assert not torch.equal(expected, torch.zeros_like(expected))


@pytest.mark.parametrize("token_rows", [0, 99], ids=["by expert", "by token"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_token_stays_alone(library: ctypes.CDLL, bad: float, token_rows: int) -> None:
    layer = make_layer(3, 64, 32, 16, NVFP4, activation=GPT_OSS)
    x, (ids, weights) = _x(6, 64), make_choices(6, 2, 3, "one")
    clean = _run(library, layer, x, ids, weights, SMALL, token_rows)
    x[2, 5] = bad
    y = _run(library, layer, x, ids, weights, SMALL, token_rows)
    rest = [0, 1, 3, 4, 5]
    assert torch.equal(y[rest], clean[rest])
    # the limits of gpt-oss' activation make an infinite product finite, but not NaN
    assert torch.isnan(y[2]).all() if bad != bad else not torch.equal(y[2], clean[2])


def test_scales_of_nan_and_zero_do_what_the_format_says(library: ctypes.CDLL) -> None:
    layer = make_layer(2, 32, 32, 16, NVFP4)
    scale = layer.down.block_scale.clone()
    scale[0, 3, 0], scale[1, 4] = 0x7F, 0
    layer = replace(layer, down=replace(layer.down, block_scale=scale))
    y = _run(library, layer, _x(2, 32), torch.tensor([[0], [1]]), torch.ones(2, 1), SMALL)
    assert torch.isnan(y[0]).nonzero().flatten().tolist() == [3]
    assert y[1, 4] == 0
    assert torch.isfinite(y[1]).all()


def _halves(pairs: ctypes.Array, dtype: torch.dtype) -> Tensor:
    """float64 [pairs, 2]: low and high."""
    return torch.tensor(list(pairs), dtype=torch.int64).to(torch.int32).view(dtype).double().view(-1, 2)


@pytest.mark.parametrize(("type", "dtype", "shift", "lift"), [(0, torch.bfloat16, 126, 118), (1, torch.float16, 14, 7)])
def test_every_code_and_scale_decodes_exactly(
    library: ctypes.CDLL, type: int, dtype: torch.dtype, shift: int, lift: int
) -> None:
    values = decode_table(E2M1).double()
    out4, out2 = (ctypes.c_uint32 * 4)(), (ctypes.c_uint32 * 2)()
    for first in range(16):
        codes = [(first + 5 * i) % 16 for i in range(8)]
        library.decode(type, sum(code << 4 * i for i, code in enumerate(codes)), out4)
        found = _halves(out4, dtype) * 2.0**shift
        assert found.T.flatten().tolist() == values[codes].tolist()
    scales = decode_table(E4M3).double()
    for byte in range(256):
        library.scales(type, byte | (255 - byte) << 8, out2)
        found = _halves(out2, dtype) * 2.0**-lift
        expected = scales[[byte, byte, 255 - byte, 255 - byte]].view(2, 2)
        assert torch.equal(found.nan_to_num(nan=999), expected.nan_to_num(nan=999)), byte


@pytest.mark.parametrize(("type", "dtype", "shift"), [(0, torch.bfloat16, 126), (1, torch.float16, 14)])
def test_every_mx_scale_decodes_as_the_dtype_holds_it(
    library: ctypes.CDLL, type: int, dtype: torch.dtype, shift: int
) -> None:
    out = (ctypes.c_uint32 * 2)()
    for byte in range(256):
        library.mx_factors(type, byte, out)
        first, second = _halves(out, dtype)
        scale = (first * second * 2.0**-shift)[0].item()
        if byte == 255:
            assert scale != scale
        elif dtype == torch.bfloat16 or 99 <= byte <= 142:  # all of float16's powers of two
            assert scale == 2.0 ** (byte - 127)
        else:
            assert scale <= 2.0**-28 if byte < 127 else scale >= 2.0**15


CHOSEN = {
    "qwen3-30b-a3b": (2048, 768, 8),
    "qwen3-235b-a22b": (4096, 1536, 8),
    "gpt-oss": (2880, 2880, 4),
    "deepseek": (7168, 2048, 8),
}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_kernels_that_models_take_build_without_spills(arch: str) -> None:
    names = {"combine<0>": 0}
    models = CHOSEN if arch == "sm_90a" else ("qwen3-30b-a3b",)
    for k, intermediate, top_k in map(CHOSEN.__getitem__, models):
        chosen = moe.choose_variants(k, intermediate, top_k)
        for mode, v in ((Mode.GATED, chosen.gated), (Mode.DOWN, chosen.down), (Mode.TOKEN, chosen.token)):
            names[v.name(torch.bfloat16, False, mode)] = v.row_blocks * v.steps * 8
    built = compile_cuda(Program(moe.SOURCE, tuple(names)), arch)
    for name, products in names.items():
        kernel = built[name]
        assert kernel.num_spills == 0, name
        assert kernel.stack_bytes == 0, name
        assert kernel.count("HMMA") == products, name
        if products:
            assert kernel.registers <= 168, name
            assert kernel.count("LDG.E.128") + kernel.count("LDG.E.NA.128") > 0, name


H200 = Device("cuda", (9, 0), "H200", 132, 232448, 60 << 20)


def test_what_the_kernel_cannot_take_is_said() -> None:
    layer = make_layer(2, 48, 32, 16, NVFP4)
    x, ids = _x(2, 48), torch.zeros(2, 2, dtype=torch.int64)
    assert "multiple of 32" in str(moe.why_not(x, ids, layer.gate_up, layer.down, H200))
    layer = make_layer(2, 64, 32, 16, NVFP4)
    x = _x(2, 64)
    assert moe.why_not(x, ids, layer.gate_up, layer.down, H200) is None
    assert "sm_90" in str(moe.why_not(x, ids, layer.gate_up, layer.down, replace(H200, capability=(8, 0))))
    many = torch.zeros(513, 2, dtype=torch.int64)
    assert "1026" in str(moe.why_not(_x(513, 64), many, layer.gate_up, layer.down, H200))
    little = replace(H200, shared_memory_bytes=1000)
    assert "shared memory" in str(moe.why_not(x, ids, layer.gate_up, layer.down, little))
    with pytest.raises(FormatError, match="sm_90") as caught:
        moe.moe(x, ids, torch.ones(2, 2), layer.gate_up, layer.down)
    assert "triton" in caught.value.hint


def test_no_tokens() -> None:
    layer = make_layer(2, 64, 32, 16, NVFP4)
    empty = torch.empty(0, 2, dtype=torch.int64)
    assert moe.moe(_x(0, 64), empty, torch.empty(0, 2), layer.gate_up, layer.down).shape == (0, 16)
