"""What lies beside a weight, to disk and back, and what is refused by either way."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockscale.checkpoint.dialects import compressed_tensors, modelopt
from blockscale.checkpoint.linear import W4A4, W4A16, W8A8, QuantizedLinear
from blockscale.checkpoint.load import check_scales, load_linear, plain_values
from blockscale.checkpoint.reader import bits_per_parameter, open_checkpoint
from blockscale.errors import CheckpointError
from blockscale.formats.tensor import encode

from .branched import K, N, algorithm, branched, drawn, same_low_rank, same_residual, stored, write
from .files import same

X = "model.layers.0.mlp.down_proj"


def read(folder: Path) -> dict[str, QuantizedLinear]:
    quantized = open_checkpoint(folder).quantized
    assert quantized is not None
    return {name: load_linear(linear, torch.bfloat16) for name, linear in quantized.linears.items()}


# ---------------------------------------------------------------- there and back


@pytest.mark.parametrize(
    ("rank", "channels", "name"),
    [(0, 16, "NVFP4"), (4, 0, "NVFP4_SVD"), (1, 64, "NVFP4_SVD"), (32, 48, "NVFP4_SVD"), (0, 0, "NVFP4")],
)
@pytest.mark.parametrize("pre_quant", [False, True])
def test_they_come_back(rank: int, channels: int, name: str, pre_quant: bool, tmp_path: Path) -> None:
    ours = {
        f"model.layers.{i}.mlp.down_proj": branched(rank=rank, channels=channels, seed=i, pre_quant=pre_quant)
        for i in range(2)
    }
    folder = write(tmp_path / "out", ours)
    wanted = "NVFP4_AWQ" if pre_quant and not rank else name
    assert algorithm(folder) == wanted
    assert json.loads((folder / "hf_quant_config.json").read_text())["quantization"]["quant_algo"] == wanted
    checkpoint = open_checkpoint(folder)
    assert checkpoint.kept.keys() == {"lm_head.weight"}
    for module, theirs in read(folder).items():
        assert theirs.scheme == W4A4
        assert same(theirs.weight.packed, ours[module].weight.packed)
        assert same_low_rank(theirs.low_rank, ours[module].low_rank)
        assert same_residual(theirs.residual, ours[module].residual)
        assert (theirs.pre_quant_scale is not None) == pre_quant


def test_some_have_one_and_some_do_not(tmp_path: Path) -> None:
    ours = {"a.o_proj": branched(channels=0), "b.o_proj": branched(rank=0), "c.o_proj": branched(rank=0, channels=0)}
    found = read(write(tmp_path / "out", ours))
    assert {n: (x.low_rank is not None, x.residual is not None) for n, x in found.items()} == {
        "a.o_proj": (True, False),
        "b.o_proj": (False, True),
        "c.o_proj": (False, False),
    }


def test_a_branch_beside_16_bit_inputs(tmp_path: Path) -> None:
    """Model Optimizer has no name for it, but the config's group says that inputs are not rounded."""
    ours = branched(W4A16, channels=0)
    folder = write(tmp_path / "out", {X: ours})
    assert algorithm(folder) == "NVFP4_SVD"
    found = read(folder)[X]
    assert found.scheme == W4A16
    assert same_low_rank(found.low_rank, ours.low_rank)


def test_a_mixture_names_each_layer(tmp_path: Path) -> None:
    fp8 = QuantizedLinear(W8A8, encode(drawn(N, K).bfloat16(), W8A8.weight), torch.tensor(0.1))
    ours = {
        "a.o_proj": branched(),
        "b.o_proj": branched(rank=0),
        "c.o_proj": fp8,
        "d.o_proj": branched(W4A16, channels=0),
    }
    folder = write(tmp_path / "out", ours)
    layers = json.loads((folder / "config.json").read_text())["quantization_config"]["quantized_layers"]
    assert {name: entry["quant_algo"] for name, entry in layers.items()} == {
        "a.o_proj": "NVFP4_SVD",
        "b.o_proj": "NVFP4",
        "c.o_proj": "FP8",
        "d.o_proj": "W4A16_NVFP4",
    }
    found = read(folder)
    assert {n: x.scheme for n, x in found.items()} == {n: x.scheme for n, x in ours.items()}
    assert all(same_low_rank(found[name].low_rank, ours[name].low_rank) for name in ours)


def test_the_names_that_model_optimizers_export_leaves(tmp_path: Path) -> None:
    ours = branched(channels=0)
    tensors = stored({X: ours})
    for letter in "ab":
        tensors[f"{X}.weight_quantizer._svdquant_lora_{letter}"] = tensors.pop(f"{X}.svdquant_lora_{letter}")
    assert same_low_rank(read(write(tmp_path / "out", {X: ours}, tensors))[X].low_rank, ours.low_rank)


def test_names_shapes_and_bits(tmp_path: Path) -> None:
    tensors = stored({X: branched(rank=4, channels=32)})
    assert {n.removeprefix(f"{X}."): (t.dtype, tuple(t.shape)) for n, t in tensors.items() if n.startswith(X)} == {
        "weight": (torch.uint8, (N, K // 2)),
        "weight_scale": (torch.float8_e4m3fn, (N, K // 16)),
        "weight_scale_2": (torch.float32, ()),
        "input_scale": (torch.float32, ()),
        "svdquant_lora_a": (torch.bfloat16, (4, K)),
        "svdquant_lora_b": (torch.bfloat16, (N, 4)),
        "residual_channels": (torch.int32, (32,)),
        "residual_weight": (torch.uint8, (N, 16)),
        "residual_weight_scale": (torch.float8_e4m3fn, (N, 2)),
    }
    checkpoint = open_checkpoint(write(tmp_path / "out", {X: branched(rank=4, channels=32)}))
    num_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
    assert bits_per_parameter(checkpoint) == pytest.approx(8 * num_bytes / (N * K + 8 * K))


def test_planned_on_meta_tensors() -> None:
    real = branched(pre_quant=True)
    planned, written = (modelopt.to_tensors("x", linear) for linear in (real.to("meta"), real))
    assert {n: (t.dtype, t.shape) for n, t in planned.items()} == {n: (t.dtype, t.shape) for n, t in written.items()}


def test_a_branch_of_rank_zero_is_none() -> None:
    ours = branched(rank=4, channels=0)
    assert ours.low_rank is not None
    nothing = replace(ours.low_rank, up=ours.low_rank.up[:, :0], down=ours.low_rank.down[:0])
    assert not any("lora" in name for name in modelopt.to_tensors("x", replace(ours, low_rank=nothing)))


def test_what_a_weight_stands_for_has_its_branch_in_it() -> None:
    ours = branched(pre_quant=True)
    assert ours.low_rank is not None
    assert ours.pre_quant_scale is not None
    whole = ours.weight.dequantize(torch.float32).double() + ours.low_rank.up.double() @ ours.low_rank.down.double()
    wanted = whole * ours.pre_quant_scale.double()
    assert torch.allclose(plain_values(ours).double(), wanted, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- what is not written


def test_compressed_tensors_has_no_place() -> None:
    for linear, what in ((branched(channels=0), "a low-rank branch"), (branched(rank=0), "residual channels")):
        for each in (linear, linear.to("meta")):  # before any work, too
            with pytest.raises(CheckpointError, match=f"^x: compressed-tensors cannot hold {what}") as caught:
                compressed_tensors.to_tensors("x", each)
            assert "modelopt" in caught.value.hint


def test_weights_that_can_have_none() -> None:
    stack = encode(drawn(2, N, K).bfloat16(), W4A4.weight)
    fp8 = encode(drawn(N, K).bfloat16(), W8A8.weight)
    ours = branched()
    for changed, what in (
        (replace(ours, weight=stack, residual=None), "a low-rank branch"),
        (replace(ours, weight=stack, low_rank=None), "residual channels"),
        (replace(ours, scheme=W8A8, weight=fp8, residual=None), "a low-rank branch"),
        (replace(ours, scheme=W4A16, low_rank=None), "residual channels"),
    ):
        with pytest.raises(CheckpointError, match=f"^x: there is no place for {what}"):
            modelopt.to_tensors("x", changed)


def test_one_product_has_one_global_scale() -> None:
    ours = branched(rank=0)
    assert ours.residual is not None
    other = replace(ours.residual, weight=replace(ours.residual.weight, global_scale=torch.tensor(0.5)))
    with pytest.raises(CheckpointError, match=r"global scale 0\.5"):
        modelopt.to_tensors("x", replace(ours, residual=other))


# ---------------------------------------------------------------- what is not read

Change = Callable[[dict[str, Tensor]], object]


def put(suffix: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({f"{X}.{suffix}": tensor})


def drop(*suffixes: str) -> Change:
    return lambda tensors: [tensors.pop(f"{X}.{suffix}") for suffix in suffixes]


def cast(suffix: str, dtype: torch.dtype) -> Change:
    return lambda tensors: tensors.update({f"{X}.{suffix}": tensors[f"{X}.{suffix}"].to(dtype)})


BF16 = torch.bfloat16
MISSHAPEN: dict[str, tuple[Change, str]] = {
    "half a branch": (drop("svdquant_lora_a"), rf"{X}: .*{X}\.svdquant_lora_b is there"),
    "the other half": (drop("svdquant_lora_b"), rf"{X}: .*{X}\.svdquant_lora_a is there"),
    "ranks that differ": (put("svdquant_lora_b", torch.ones(N, 3, dtype=BF16)), r"svdquant_lora_b: BF16 \[48, 3\]"),
    "other inputs": (put("svdquant_lora_a", torch.ones(4, 63, dtype=BF16)), r"svdquant_lora_a: BF16 \[4, 63\]"),
    "a factor turned round": (put("svdquant_lora_a", torch.ones(K, 4, dtype=BF16)), r"svdquant_lora_a: BF16 \[64, 4\]"),
    "a rank of nothing": (put("svdquant_lora_a", torch.ones(0, K, dtype=BF16)), r"svdquant_lora_a: BF16 \[0, 64\]"),
    "a vector": (put("svdquant_lora_a", torch.ones(K, dtype=BF16)), r"svdquant_lora_a: BF16 \[64\]"),
    "a scalar": (put("svdquant_lora_a", torch.ones((), dtype=BF16)), r"svdquant_lora_a: BF16 \[\]"),
    "integers": (cast("svdquant_lora_a", torch.int32), "svdquant_lora_a: I32"),
    "FP8": (cast("svdquant_lora_b", torch.float8_e4m3fn), "svdquant_lora_b: F8_E4M3"),
    "channels alone": (drop("residual_weight", "residual_weight_scale"), "packed and block scale missing"),
    "no channels": (drop("residual_channels"), "channels missing"),
    "no scales": (drop("residual_weight_scale"), "block scale missing"),
    "15 channels": (put("residual_channels", torch.arange(15).int()), "15 channels of 64 are no whole blocks"),
    "no channel at all": (put("residual_channels", torch.arange(0).int()), "0 channels of 64"),
    "80 channels": (put("residual_channels", torch.arange(80).int()), "80 channels of 64"),
    "fewer channels": (put("residual_weight", torch.ones(N, 16, dtype=torch.uint8)), r"residual_weight: U8 \[48, 16\]"),
    "fewer rows": (put("residual_weight", torch.ones(N - 1, 8, dtype=torch.uint8)), r"residual_weight: U8 \[47, 8\]"),
    "int64": (cast("residual_channels", torch.int64), "residual_channels: I64"),
    "a matrix of channels": (put("residual_channels", torch.ones(16, 1).int()), r"residual_channels: I32 \[16, 1\]"),
    "scales in fp32": (cast("residual_weight_scale", torch.float32), "residual_weight_scale: F32"),
    "residual channels of 16-bit inputs": (drop("input_scale"), "its input_scale is missing"),
}


@pytest.mark.parametrize("name", MISSHAPEN)
def test_misshapen(name: str, tmp_path: Path) -> None:
    change, message = MISSHAPEN[name]
    tensors = stored({X: branched()})
    change(tensors)
    folder = write(tmp_path / "out", {X: branched()}, tensors)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_residual_channels_beside_other_weights(tmp_path: Path) -> None:
    ours = branched(W4A16, channels=0, rank=0)
    tensors = stored({X: ours})
    tensors |= {n: t for n, t in stored({X: branched(rank=0)}).items() if "residual" in n}
    with pytest.raises(CheckpointError, match=r"residual channels correct NVFP4 inputs.* nvfp4/16-bit"):
        open_checkpoint(write(tmp_path / "out", {X: ours}, tensors))
    fp8 = QuantizedLinear(W8A8, encode(drawn(N, K).bfloat16(), W8A8.weight), torch.tensor(0.1))
    tensors = stored({X: fp8}) | {n: t for n, t in stored({X: branched(channels=0)}).items() if "lora" in n}
    with pytest.raises(CheckpointError, match="low-rank branch beside fp8 is not read"):
        open_checkpoint(write(tmp_path / "fp8", {X: fp8}, tensors))


def test_parts_of_a_weight_that_is_not_there(tmp_path: Path) -> None:
    for suffix in ("svdquant_lora_a", "residual_channels", "residual_weight", "residual_weight_scale"):
        tensors = stored({X: branched()})
        tensors[f"model.other.{suffix}"] = tensors[f"{X}.{suffix}"].clone()
        folder = write(tmp_path / suffix, {X: branched()}, tensors)
        with pytest.raises(CheckpointError, match=f"model.other.{suffix} belongs to no quantized weight"):
            open_checkpoint(folder)


def test_a_config_that_promises_a_branch(tmp_path: Path) -> None:
    ours = branched(channels=0)
    plain = stored({X: replace(ours, low_rank=None)})
    with pytest.raises(CheckpointError, match="NVFP4_SVD, and no weight has"):
        open_checkpoint(write(tmp_path / "out", {X: ours}, plain))
    fp8 = QuantizedLinear(W8A8, encode(drawn(N, K).bfloat16(), W8A8.weight), torch.tensor(0.1))
    mixture = {X: ours, "b.o_proj": fp8}
    plain = stored({X: replace(ours, low_rank=None), "b.o_proj": fp8})
    with pytest.raises(CheckpointError, match=f"{X}: the config says NVFP4_SVD"):
        open_checkpoint(write(tmp_path / "mixed", mixture, plain))


DAMAGED: dict[str, tuple[Change, str]] = {
    "NaN up": (lambda t: t[f"{X}.svdquant_lora_b"][3, 1].fill_(torch.nan), r"svdquant_lora_b: nan at \[3, 1\]"),
    "Inf down": (lambda t: t[f"{X}.svdquant_lora_a"][0, 63].fill_(torch.inf), r"svdquant_lora_a: inf at \[0, 63\]"),
    "a channel beyond": (lambda t: t[f"{X}.residual_channels"][7].fill_(64), "residual_channels: .*inputs have 64"),
    "a channel below": (lambda t: t[f"{X}.residual_channels"][7].fill_(-1), "residual_channels: channels from -1"),
    "a channel twice": (lambda t: t[f"{X}.residual_channels"][7:9].fill_(5), "of 16 different"),
    "a NaN scale": (
        lambda t: t[f"{X}.residual_weight_scale"].view(torch.uint8)[2, 0].fill_(0x7F),
        r"residual_weight_scale: NaN.* at \[2, 0\]",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged(name: str, tmp_path: Path) -> None:
    change, message = DAMAGED[name]
    tensors = stored({X: branched()})
    change(tensors)
    quantized = open_checkpoint(write(tmp_path / "out", {X: branched()}, tensors)).quantized
    assert quantized is not None
    for look in (lambda linear: load_linear(linear, torch.bfloat16), check_scales):
        with pytest.raises(CheckpointError, match=message):
            look(quantized.linears[X])
