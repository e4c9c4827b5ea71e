"""The portable W4A16 linear against float64: in the interpreter, and its machine code for every target."""

import pytest
import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.spec import MXFP4, NVFP4, Format
from blockscale.formats.tensor import encode
from blockscale.kernels.prepare import PreparedWeight, from_row_major, row_major
from blockscale.kernels.triton import linear as compiled
from blockscale.kernels.triton.linear import Config, choose

from .compiled import TRITON_ARCHS, Compiled, compile_triton
from .interpreter import interpreted

kernels = interpreted("blockscale.kernels.triton.linear")

SMALL, SPLIT = Config(64, 16, 64, 4, 2), Config(64, 16, 64, 4, 2, split=3)
REORDERED, REORDERED_SPLIT = Config(64, 16, 128, 4, 2, reorder=True), Config(64, 16, 64, 4, 2, split=2, reorder=True)
EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # unit roundoff of the output


def made(n: int, k: int, fmt: Format, seed: int = 0) -> PreparedWeight:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, k, generator=generator)
    values[n // 2] = 0  # a zero row
    return row_major(encode(values, fmt))


def activations(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def exact(x: Tensor, weight: PreparedWeight, bias: Tensor | None = None) -> Tensor:
    """float64 product over the weight's values."""
    q = from_row_major(weight)
    unscaled = q.dequantize(torch.float64) if q.global_scale is None else _unscaled(q).double()
    y = x.double() @ unscaled.T * weight.global_scale.double()
    return y if bias is None else y + bias.double()


def _unscaled(q) -> Tensor:
    from blockscale.formats.nvfp4 import decode_unscaled

    return decode_unscaled(q.packed, q.block_scale)


def assert_near(y: Tensor, x: Tensor, weight: PreparedWeight, bias: Tensor | None = None) -> None:
    """Within one rounding of the output and K roundings of fp32 sums of the terms' magnitudes."""
    want = exact(x, weight, bias)
    terms = x.double().abs() @ from_row_major(weight).dequantize(torch.float64).abs().T
    bound = want.abs() * EPSILON[x.dtype] + (terms + want.abs()) * weight.k * 2.0**-24 + 2.0**-24
    assert y.dtype == x.dtype
    assert y.shape == want.shape
    assert ((y.double() - want).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda f: f.name)
@pytest.mark.parametrize("config", [None, SMALL, SPLIT, REORDERED, REORDERED_SPLIT])
def test_product_with_bias_over_ragged_sizes(config: Config | None, fmt: Format, dtype: torch.dtype) -> None:
    weight = made(70, 224, fmt)
    x, bias = activations(19, 224, dtype=dtype), activations(70, dtype=dtype)
    assert_near(kernels.linear(x, weight, bias, config), x, weight, bias)


@pytest.mark.parametrize("m", [1, 2, 33])
@pytest.mark.parametrize(("n", "k"), [(1, 16), (5, 48), (129, 80), (64, 256)])
@pytest.mark.parametrize("config", [SMALL, SPLIT, REORDERED])
def test_any_n_and_any_k_of_whole_blocks(n: int, k: int, m: int, config: Config) -> None:
    weight, x = made(n, k, NVFP4), activations(m, k)
    assert_near(kernels.linear(x, weight, None, config), x, weight)


@pytest.mark.parametrize("config", [SMALL, SPLIT, REORDERED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda f: f.name)
def test_exactly_representable_sums_come_out_exact(fmt: Format, dtype: torch.dtype, config: Config) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = made(66, 160, fmt)
    scale = 0x38 if fmt is NVFP4 else 127  # 1.0
    weight.block_scale.fill_(scale)
    weight.packed.copy_(torch.randint(0, 256, weight.packed.shape, generator=generator, dtype=torch.uint8))
    if fmt is NVFP4:
        weight.global_scale.fill_(2.0)
    # 2 * 24 halves a row at most: every partial sum has few bits
    x = torch.zeros(9, 160)
    x[:, torch.randperm(160, generator=generator)[:8]] = 1.0
    x = (x * torch.randint(-1, 2, x.shape, generator=generator)).to(dtype)
    assert torch.equal(kernels.linear(x, weight, None, config).double(), exact(x, weight))


@pytest.mark.parametrize("config", [SMALL, SPLIT, REORDERED])
def test_batched_and_strided_activations(config: Config) -> None:
    weight = made(65, 96, NVFP4)
    wide = activations(2, 2, 3, 192)
    for x in (wide[..., 96:], wide[:, :, 1, :96], wide.transpose(0, 2)[..., :96], wide[..., ::2], wide[0, 0, 0, :96]):
        y = kernels.linear(x, weight, None, config)
        assert torch.equal(y, kernels.linear(x.contiguous(), weight, None, config))
        assert_near(y, x, weight)


def test_a_strided_bias_is_read_as_it_is() -> None:
    weight, x, bias = made(65, 96, NVFP4), activations(3, 96), activations(130)[::2]
    assert_near(kernels.linear(x, weight, bias, SMALL), x, weight, bias)


def test_no_rows_give_an_empty_result() -> None:
    weight = made(65, 96, NVFP4)
    assert kernels.linear(activations(0, 96), weight).shape == (0, 65)
    assert kernels.linear(activations(2, 0, 96), weight).shape == (2, 0, 65)


@pytest.mark.parametrize("config", [SMALL, SPLIT, REORDERED, REORDERED_SPLIT])
def test_the_whole_output_is_written_and_nothing_beyond(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = made(70, 80, NVFP4), activations(19, 80)
    real, margins = torch.empty, []

    def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        size = torch.Size(shape).numel()
        whole = torch.full((size + 64,), torch.nan, dtype=dtype, device=device)
        margins.append(whole[size:])
        return whole[:size].view(shape)

    monkeypatch.setattr(torch, "empty", poisoned)
    y = kernels.linear(x, weight, None, config)
    monkeypatch.setattr(torch, "empty", real)
    assert_near(y, x, weight)
    assert all(margin.isnan().all() for margin in margins)


@pytest.mark.parametrize("config", [SMALL, SPLIT, REORDERED])
def test_memory_beyond_the_operands_is_not_used(config: Config) -> None:
    weight, x = made(70, 80, NVFP4), activations(19, 80)
    codes = torch.full((80, 40), 0x7F, dtype=torch.uint8)
    scales = torch.full((80 * 5,), 0x7F, dtype=torch.uint8)  # NaN
    rows = torch.full((24, 128), torch.nan, dtype=torch.bfloat16)
    codes[:70], scales[: 70 * 5], rows[:19, :80] = weight.packed, weight.block_scale.flatten(), x
    parts = {"packed": codes[:70], "block_scale": scales[: 70 * 5].view(70, 5)}
    inside = PreparedWeight(**{**vars(weight), **parts})
    assert_near(kernels.linear(rows[:19, :80], inside, None, config), x, weight)


@pytest.mark.parametrize("config", [SMALL, SPLIT, REORDERED])
def test_nan_and_inf_go_where_a_product_takes_them(config: Config) -> None:
    weight, x = made(66, 96, NVFP4), activations(4, 96)
    x[1, 70], x[2, 3] = torch.nan, torch.inf
    y = kernels.linear(x, weight, None, config)
    assert y[1].isnan().all()
    want = exact(x, weight)
    assert torch.equal(y[2].isnan(), want[2].isnan())  # Inf * 0
    assert torch.equal(y[2][~want[2].isnan()].double(), want[2][~want[2].isnan()])
    assert torch.equal(y[[0, 3]], kernels.linear(x[[0, 3]], weight, None, config))


def test_scale_bytes_of_zero_and_nan() -> None:
    weight, x = made(66, 96, NVFP4), activations(4, 96)
    weight.block_scale[3] = 0
    weight.block_scale[5, 2] = 0x7F
    y = kernels.linear(x, weight, None, SMALL)
    assert (y[:, 3] == 0).all()
    assert y[:, 5].isnan().all()
    assert y.isnan().sum() == 4


def test_parts_of_k_are_added_in_one_order() -> None:
    weight, x = made(64, 1024, NVFP4), activations(3, 1024)
    config = Config(64, 16, 64, 4, 2, split=4)
    assert torch.equal(kernels.linear(x, weight, None, config), kernels.linear(x, weight, None, config))


def test_operands_that_do_not_fit_are_refused() -> None:
    weight, x = made(70, 80, NVFP4), activations(4, 80)
    stack = PreparedWeight(**{**vars(weight), "shape": (1, 70, 80)})
    for bad_x, bad_weight, bad_bias in (
        (x.float(), weight, None),
        (x[:, :64], weight, None),
        (x, stack, None),
        (x, weight, activations(69)),
        (x, weight, activations(70, dtype=torch.float16)),
        (x, PreparedWeight(**{**vars(weight), "packed": weight.packed.T.contiguous().T}), None),
        (x, PreparedWeight(**{**vars(weight), "packed": torch.empty(70 * 40 + 1, dtype=torch.uint8)[1:]}), None),
    ):
        with pytest.raises(FormatError, match="linear_w4a16"):
            kernels.linear(bad_x, bad_weight, bad_bias)


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels run here")
def test_compiled_kernels_refuse_the_cpu() -> None:
    with pytest.raises(FormatError, match="x is on cpu"):
        compiled.linear(activations(4, 80), made(70, 80, NVFP4))


# --- the choice and the machine code --------------------------------------------------------------------------------

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
SHARED_BYTES = {(8, 0): 163 << 10, (8, 6): 99 << 10, (8, 9): 99 << 10, (12, 0): 99 << 10, (12, 1): 99 << 10}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_product_has_a_configuration(capability: tuple[int, int]) -> None:
    for m in (1, 8, 9, 16, 17, 64, 65, 512, 16384):
        for n, k in ((1, 16), (4096, 4096), (57344, 8192), (8192, 28672)):
            config = choose(m, n, k, capability, 132)
            assert config.block_k % 64 == 0
            assert config.split == 1 or k >= config.split * config.block_k


def machine_code(arch: str, config: Config, dtype: str = "*bf16", is_mx: bool = False) -> Compiled:
    """`_multiply` as its launcher would build it for sizes that are multiples of 16."""
    sizes = ("M", "N", "K", "x_length", "x_stride", "group_stride", "scale_stride", "steps")
    signature = {
        **dict.fromkeys(("x", "input_scale", "bias"), dtype),
        "y": "*fp32" if config.split > 1 else dtype,
        "global_scale": "*fp32",
        "groups": "*i64",
        "scales": "*u8",
        **dict.fromkeys(sizes, "i32"),
    }
    constants = {
        "BLOCK_N": config.block_n,
        "BLOCK_M": config.block_m,
        "BLOCK_K": config.block_k,
        "SPLIT": config.split,
        "MX": is_mx,
        "REORDERED": config.reorder,
        "UNCHAINED": config.unchained,
        "EVEN": True,
        "HAS_INPUT_SCALE": False,
        "HAS_BIAS": True,
    }
    aligned = ("x", "groups", "scales", "y", "N", "x_stride", "group_stride", "scale_stride")
    stages = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return compile_triton(compiled._multiply, signature, constants, arch, divisible_by_16=aligned, **stages)


# tensor core instructions of each target; sm_100 takes tcgen05
MMA = {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}


@pytest.mark.parametrize(
    ("arch", "m"),
    [(arch, 1) for arch in TRITON_ARCHS] + [(arch, 4096) for arch in ("sm_80", "sm_90", "sm_100", "sm_120")],
)
def test_every_target_gets_tensor_cores_without_spills(arch: str, m: int) -> None:
    number = int(arch.removeprefix("sm_"))
    capability = (number // 10, number % 10)
    code = machine_code(arch, choose(m, 8192, 8192, capability, 132))
    assert code.count(MMA.get(arch, "HMMA"))
    assert code.num_spills == 0
    assert code.shared_bytes <= SHARED_BYTES.get(capability, 227 << 10)


def test_wgmmas_of_one_step_run_without_a_wait_between_them() -> None:
    config = choose(4096, 8192, 8192, (9, 0), 132)
    code = machine_code("sm_90", config)
    assert code.count("WARPGROUP.DEPBAR") < code.count("HGMMA")


@pytest.mark.parametrize(("dtype", "is_mx"), [("*fp16", False), ("*bf16", True), ("*fp16", True)])
def test_every_kind_of_operand_compiles_without_spills(dtype: str, is_mx: bool) -> None:
    code = machine_code("sm_80", choose(16, 8192, 8192, (8, 0), 108), dtype, is_mx)
    assert code.count("HMMA.1688.F32.TF32" if is_mx and dtype == "*fp16" else "HMMA.16816.F32")
    assert code.num_spills == 0
