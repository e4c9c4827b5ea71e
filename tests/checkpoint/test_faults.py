"""Checkpoints that are incomplete, contradictory or damaged: one clear error that names the layer, never a guess."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blockscale.checkpoint.load import load_kv_scales, load_linear
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.errors import CheckpointError

from .files import changed

NVFP4, NVFP4_MOE, FP8 = "modelopt_llama_nvfp4", "modelopt_qwen3moe_nvfp4", "modelopt_llama_fp8"
MIXED, NVFP4_KV, AWQ = (
    "modelopt_llama_mixed_fp8attn_nvfp4mlp_fp8kv",
    "modelopt_llama_nvfp4_fp8kv",
    "modelopt_llama_nvfp4_awq_lite",
)
CT, CT_KV, CT_FP8, CT_MXFP4 = "ct_llama_nvfp4", "ct_llama_nvfp4_fp8kv", "ct_llama_fp8_dynamic", "ct_llama_mxfp4"
DOWN, EXPERT, QUERY = "model.layers.1.mlp.down_proj", "model.layers.1.mlp.experts.2.down_proj", "self_attn.q_proj"
Change = Callable[[Any], None]


def drop(name: str) -> Change:
    return lambda stored: stored.pop(name)


def put(name: str, value: Tensor) -> Change:
    return lambda stored: stored.update({name: value})


def fill(name: str, value: float) -> Change:
    return lambda stored: stored[name].fill_(value)


def byte(name: str, value: int, position: int = 5) -> Change:
    return lambda stored: stored[name].view(torch.uint8).view(-1)[position].fill_(value)


def reshape(name: str, *shape: int) -> Change:
    return lambda stored: stored.update({name: stored[name].reshape(shape)})


def rename(old: str, new: str) -> Change:
    return lambda stored: stored.update({new: stored.pop(old)})


def cast(name: str, dtype: torch.dtype) -> Change:
    return lambda stored: stored.update({name: stored[name].to(dtype)})


# found as the folder is opened, without reading a weight
MISSING_OR_MISSHAPEN: list[tuple[str, Change, str]] = [
    (NVFP4, drop(f"{DOWN}.weight_scale_2"), f"{DOWN}: quantized as nvfp4/nvfp4, but its weight_scale_2 is missing"),
    (NVFP4, drop(f"{DOWN}.weight_scale"), rf"{DOWN}\.weight has no weight_scale"),
    (NVFP4, drop(f"{DOWN}.weight"), f"{DOWN}: .* its codes are missing"),
    (NVFP4, drop(f"{DOWN}.input_scale"), f"{DOWN}: .* its input_scale is missing"),
    (NVFP4_MOE, drop(f"{EXPERT}.input_scale"), f"{EXPERT}: .* its input_scale is missing"),
    (NVFP4_MOE, drop(f"{EXPERT}.weight_scale_2"), f"{EXPERT}: .* its weight_scale_2 is missing"),
    (FP8, drop(f"{DOWN}.weight_scale"), rf"{DOWN}\.weight has no weight_scale"),
    (FP8, drop(f"{DOWN}.input_scale"), f"{DOWN}: .* its input_scale is missing"),
    (
        MIXED,
        drop(f"model.layers.0.{QUERY}.input_scale"),
        f"model.layers.0.{QUERY}: .* its input_scale is missing",
    ),
    (CT, drop(f"{DOWN}.weight_global_scale"), f"{DOWN}: .* its weight_global_scale is missing"),
    (CT, drop(f"{DOWN}.input_global_scale"), f"{DOWN}: .* its input_global_scale is missing"),
    (CT, drop(f"{DOWN}.weight_packed"), f"{DOWN}: .* its codes are missing"),
    (CT, drop(f"{DOWN}.weight_scale"), rf"{DOWN}\.weight_packed has no weight_scale"),
    (CT_FP8, drop(f"{DOWN}.weight_scale"), rf"{DOWN}\.weight has no weight_scale"),
    (CT_MXFP4, drop(f"{DOWN}.weight_scale"), rf"{DOWN}\.weight_packed has no weight_scale"),
    (NVFP4, put("model.x.weight_scale_2", torch.ones(())), "model.x.weight_scale_2 belongs to no quantized weight"),
    (NVFP4, put("model.x.input_scale", torch.ones(())), "model.x.input_scale belongs to no quantized weight"),
    (NVFP4, put("model.x.pre_quant_scale", torch.ones(4)), "model.x.pre_quant_scale belongs to no quantized weight"),
    (CT, put("model.x.input_global_scale", torch.ones(1)), "model.x.input_global_scale belongs to no quantized weight"),
    (NVFP4, put("model.x.weight", torch.ones(4, 4).to(torch.float8_e4m3fn)), "model.x.weight has no weight_scale"),
    # a scale of another shape or type than the scheme has
    (NVFP4, reshape(f"{DOWN}.weight_scale", 32, 16), rf"{DOWN}.weight_scale: \[32, 16\] does not match .*\[64, 8\]"),
    (NVFP4, reshape(f"{DOWN}.weight_scale", 512), rf"{DOWN}.weight_scale: \[512\] does not match"),
    (NVFP4, put(f"{DOWN}.weight_scale", torch.ones(64, 4).to(torch.float8_e4m3fn)), rf"{DOWN}.weight_scale: \[64, 4\]"),
    (NVFP4, put(f"{DOWN}.weight_scale", torch.ones(64, 8)), f"{DOWN}.weight_scale: nvfp4 has scales of F8_E4M3"),
    (
        NVFP4,
        put(f"{DOWN}.weight_scale", torch.ones(64, 8, dtype=torch.uint8)),
        f"{DOWN}.weight_scale: nvfp4 has scales",
    ),
    (NVFP4, put(f"{DOWN}.weight_scale_2", torch.ones(64)), rf"{DOWN}.weight_scale_2: .*\[64\], .* has 1 scales"),
    (NVFP4, put(f"{DOWN}.input_scale", torch.ones(2)), rf"{DOWN}.input_scale: .*\[2\], .* has 1 scales"),
    (NVFP4, put(f"{DOWN}.input_scale", torch.ones((), dtype=torch.int32)), f"{DOWN}.input_scale: I32"),
    (CT, put(f"{DOWN}.weight_global_scale", torch.ones(64, 1)), rf"{DOWN}.weight_global_scale: .*\[64, 1\]"),
    (AWQ, put("model.layers.0.self_attn.o_proj.pre_quant_scale", torch.ones(63)), r"o_proj.pre_quant_scale: .*\[63\]"),
    (FP8, put(f"{DOWN}.weight_scale", torch.ones(64)), rf"{DOWN}.weight_scale: .*\[64\], but fp8/fp8 has 1 scales"),
    (CT_FP8, put(f"{DOWN}.weight_scale", torch.ones(63, 1)), rf"{DOWN}.weight_scale: .*\[63, 1\], .* has 64 scales"),
    (CT_FP8, put(f"{DOWN}.weight_scale", torch.ones(1)), rf"{DOWN}.weight_scale: .*\[1\], .* has 64 scales"),
    (CT_MXFP4, reshape(f"{DOWN}.weight_scale", 32, 8), rf"{DOWN}.weight_scale: \[32, 8\] does not match"),
    (CT_MXFP4, put(f"{DOWN}.weight_scale", torch.ones(64, 8, dtype=torch.uint8)), rf"{DOWN}.weight_scale: \[64, 8\]"),
    (NVFP4, cast(f"{DOWN}.weight", torch.int8), f"{DOWN}.weight: nvfp4 is stored as U8, found I8"),
    (NVFP4, cast(f"{DOWN}.weight", torch.bfloat16), f"{DOWN}.weight: nvfp4 is stored as U8"),
    (NVFP4, reshape(f"{DOWN}.weight", 4096), rf"{DOWN}.weight: \[4096\] is no weight matrix"),
    (NVFP4, reshape(f"{DOWN}.weight", 2, 32, 64), rf"{DOWN}.weight: \[2, 32, 64\] is no weight matrix"),
    (FP8, cast(f"{DOWN}.weight", torch.bfloat16), f"{DOWN}.weight: fp8 is stored as F8_E4M3"),
    # the cache
    (
        NVFP4_KV,
        drop("model.layers.1.self_attn.v_proj.v_scale"),
        "layers.1.self_attn: a key scale without a value scale",
    ),
    (
        NVFP4_KV,
        drop("model.layers.1.self_attn.k_proj.k_scale"),
        "layers.1.self_attn: a value scale without a key scale",
    ),
    (CT_KV, drop("model.layers.1.self_attn.v_scale"), "layers.1.self_attn: a key scale without a value scale"),
    (CT_KV, drop("model.layers.1.self_attn.k_scale"), "layers.1.self_attn: a value scale without a key scale"),
    (CT_KV, put("model.layers.1.self_attn.k_scale", torch.ones(4, 1)), r"layers.1.self_attn.k_scale: .*\[4, 1\]"),
]


@pytest.mark.parametrize(("name", "change", "match"), MISSING_OR_MISSHAPEN, ids=[m for _, _, m in MISSING_OR_MISSHAPEN])
def test_parts_that_are_missing_or_do_not_fit(name: str, change: Change, match: str, tmp_path: Path) -> None:
    folder = changed(name, tmp_path, tensors=change)
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(folder)


NAN = float("nan")
BAD_VALUES: list[tuple[str, Change, str]] = [
    *((NVFP4, fill(f"{DOWN}.weight_scale_2", v), f"{DOWN}.weight_scale_2: ") for v in (0.0, -1.0, torch.inf, NAN)),
    *((NVFP4, fill(f"{DOWN}.input_scale", v), f"{DOWN}.input_scale: ") for v in (0.0, -1.0, torch.inf, NAN)),
    *(
        (CT, fill(f"{DOWN}.weight_global_scale", v), f"{DOWN}.weight_global_scale: ")
        for v in (0.0, -1.0, torch.inf, NAN)
    ),
    # a divisor this small is finite itself and has an infinite reciprocal
    *(
        (CT, fill(f"{DOWN}.input_global_scale", v), f"{DOWN}.input_global_scale: ")
        for v in (0.0, -1.0, torch.inf, 1e-40)
    ),
    *(
        (NVFP4, byte(f"{DOWN}.weight_scale", b), rf"{DOWN}.weight_scale: .*at \[0, 5\] \(1 in all\)")
        for b in (0x7F, 0xFF)
    ),
    (NVFP4, byte(f"{DOWN}.weight_scale", 0xB8), f"{DOWN}.weight_scale: NaN, infinite or negative scale"),
    (CT, byte(f"{DOWN}.weight_scale", 0x7F), f"{DOWN}.weight_scale: NaN"),
    (CT_MXFP4, byte(f"{DOWN}.weight_scale", 255, 7), rf"{DOWN}.weight_scale: NaN.*at \[1, 3\]"),
    *((FP8, fill(f"{DOWN}.weight_scale", v), f"{DOWN}.weight_scale: NaN") for v in (NAN, torch.inf, -1.0)),
    *((CT_FP8, fill(f"{DOWN}.weight_scale", v), f"{DOWN}.weight_scale: NaN") for v in (NAN, torch.inf, -1.0)),
]


@pytest.mark.parametrize(("name", "change", "match"), BAD_VALUES)
def test_values_that_no_engine_could_use(name: str, change: Change, match: str, tmp_path: Path) -> None:
    quantized = open_checkpoint(changed(name, tmp_path, tensors=change)).quantized
    assert quantized is not None
    for module, linear in quantized.linears.items():
        if module == DOWN:
            with pytest.raises(CheckpointError, match=match) as caught:
                load_linear(linear, torch.bfloat16)
            assert caught.value.hint
        else:
            load_linear(linear, torch.bfloat16)


@pytest.mark.parametrize("value", [0.0, -1.0, torch.inf, NAN])
@pytest.mark.parametrize(
    ("name", "scale"),
    [(NVFP4_KV, "self_attn.k_proj.k_scale"), (NVFP4_KV, "self_attn.v_proj.v_scale"), (CT_KV, "self_attn.v_scale")],
)
def test_cache_scales_that_no_engine_could_use(name: str, scale: str, value: float, tmp_path: Path) -> None:
    folder = changed(name, tmp_path, tensors=fill(f"model.layers.1.{scale}", value))
    quantized = open_checkpoint(folder).quantized
    assert quantized is not None
    load_kv_scales(quantized.kv_tensors["model.layers.0.self_attn"])
    with pytest.raises(CheckpointError, match=f"model.layers.1.{scale}"):
        load_kv_scales(quantized.kv_tensors["model.layers.1.self_attn"])


def test_values_that_are_odd_and_usable(tmp_path: Path) -> None:
    """Zero block scales (other producers write them for zero blocks), subnormal global scales, an FP8 scale of zero."""

    def change(stored: dict[str, Tensor]) -> None:
        stored[f"{DOWN}.weight_scale"][0] = 0
        stored[f"{DOWN}.weight_scale_2"].fill_(1e-40)
        stored[f"{DOWN}.input_scale"].fill_(1e-40)

    quantized = open_checkpoint(changed(NVFP4, tmp_path, tensors=change)).quantized
    assert quantized is not None
    linear = load_linear(quantized.linears[DOWN], torch.bfloat16)
    assert (linear.weight.dequantize()[0] == 0).all()
    zero = open_checkpoint(changed(FP8, tmp_path, tensors=fill(f"{DOWN}.weight_scale", 0.0))).quantized
    assert zero is not None
    assert (load_linear(zero.linears[DOWN], torch.bfloat16).weight.dequantize() == 0).all()


# ---------------------------------------------------------------- configs that contradict the tensors


def at(path: str, value: Any) -> Change:
    """Sets a nested key; without a value, removes it."""

    def change(config: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for parent in parents:
            config = config[parent]
        if value is None:
            del config[last]
        else:
            config[last] = value

    return change


Q = "quantization_config"
WEIGHTS = f"{Q}/config_groups/group_0/weights"
INPUTS = f"{Q}/config_groups/group_0/input_activations"
FIRST = "model.layers.0.mlp.down_proj"


def turned(*places: object) -> dict[str, Any]:
    """Rotations of every linear, applied there."""
    apply = [{"targets": ["Linear"], "location": place, "inverse": False} for place in places]
    return {"config_groups": {"u": {"type": "hadamard", "apply": apply}}}


CONTRADICTIONS: list[tuple[str, Change, str]] = [
    (NVFP4, at(f"{Q}/quant_algo", "NVFP4_SVD"), "the config says NVFP4_SVD, and no weight has a low-rank branch"),
    (NVFP4, at(f"{Q}/quant_algo", "W4A16_AWQ"), f"{FIRST}: quant_algo 'W4A16_AWQ' is not read"),
    (NVFP4, at(f"{Q}/quant_algo", "FP8"), f"{FIRST}.weight: fp8 is stored as"),
    (
        NVFP4,
        at(f"{Q}/quant_algo", "W4A8_NVFP4_FP8"),
        rf"{FIRST}.weight_scale: \[64, 8\] does not match .* blocks of 32",
    ),
    (NVFP4, at(f"{Q}/quant_algo", "mxfp4"), f"{FIRST}.weight_scale: mxfp4 has scales of U8"),
    (NVFP4, at(f"{Q}/quant_algo", "MIXED_PRECISION"), f"{FIRST} has scales, but quantized_layers does not name it"),
    (FP8, at(f"{Q}/quant_algo", "NVFP4"), f"{FIRST}: .* its weight_scale_2 is missing"),
    (FP8, at(f"{Q}/quant_algo", "FP8_PER_CHANNEL_PER_TOKEN"), rf"{FIRST}.weight_scale: .*\[\], .* has 64 scales"),
    (NVFP4, at(f"{WEIGHTS}/group_size", 32), f"{FIRST}: nvfp4 with group_size 32 is not read"),
    (NVFP4, at(f"{Q}/group_size", 128), f"{FIRST}: nvfp4 with group_size 128 is not read"),
    (MIXED, at(f"{Q}/quantized_layers", {}), "k_proj has scales, but quantized_layers does not name it"),
    (MIXED, lambda c: c[Q]["quantized_layers"].pop(FIRST), f"{FIRST} has scales, but quantized_layers"),
    (MIXED, lambda c: c[Q]["quantized_layers"][FIRST].update(quant_algo="INT8"), f"{FIRST}: quant_algo 'INT8'"),
    (MIXED, lambda c: c[Q]["quantized_layers"][FIRST].update(group_size=32), f"{FIRST}: nvfp4 with group_size 32"),
    (MIXED, lambda c: c[Q]["quantized_layers"].update({FIRST: {"quant_algo": "FP8"}}), f"{FIRST}.weight: fp8"),
    (MIXED, lambda c: c[Q]["quantized_layers"].update({FIRST: {}}), f"{FIRST} has scales, but quantized_layers"),
    (NVFP4_KV, at(f"{Q}/kv_cache_scheme", "INT8"), "KV cache INT8 is not read"),
    (CT, at(f"{WEIGHTS}/group_size", 32), "nvfp4 with group_size 32 is not read"),
    (CT, at(f"{WEIGHTS}/type", "int"), "a config group is not read: .*int"),
    (CT, at(f"{WEIGHTS}/num_bits", 3), "a config group is not read"),
    (CT, at(f"{WEIGHTS}/strategy", "block"), "a config group is not read"),
    (CT, at(f"{WEIGHTS}/strategy", "channel"), "a config group is not read"),
    (CT, at(f"{WEIGHTS}/strategy", None), "a malformed config group"),
    (CT, at(f"{INPUTS}/num_bits", None), "a malformed config group"),
    (CT, at(f"{INPUTS}/strategy", "channel"), "a config group is not read"),
    (CT_FP8, at(f"{INPUTS}/strategy", "tensor"), "a config group is not read"),  # a scale found at run time
    (CT_MXFP4, at(f"{WEIGHTS}/group_size", 16), "mxfp4 with group_size 16 is not read"),
    (CT_MXFP4, at(f"{WEIGHTS}/strategy", "tensor_group"), "nvfp4 with group_size 32 is not read"),
    (CT, at(f"{WEIGHTS}", None), "no config_groups with weights"),
    (CT, at(f"{Q}/config_groups", {}), "no config_groups with weights"),
    (CT, at(f"{Q}/config_groups", None), "no config_groups with weights"),
    (CT, at(f"{Q}/config_groups", []), "no config_groups with weights"),
    (CT, at(f"{Q}/config_groups", {"group_0": "NVFP4"}), "a malformed config group"),
    (CT, at(f"{Q}/config_groups/group_0/targets", ["re:.*layers[.]1.*"]), f"{FIRST} has scales, but no config group"),
    (CT, at(f"{Q}/config_groups/group_0/targets", ["re:(["]), r"'re:\(\[' is no regular expression"),
    (CT, at(f"{Q}/config_groups/group_0/targets", []), "has scales, but no config group targets it"),
    (CT, at(f"{Q}/transform_config", turned("weight_output", "input")), "a transform_config that is applied"),
    (CT, at(f"{Q}/transform_config", turned("k_cache", "q_attn")), "a transform_config that is applied"),
    (CT, at(f"{Q}/transform_config", turned(["input"])), "a transform_config that is applied"),
    (CT, at(f"{Q}/transform_config", {"config_groups": {"u": {"type": "hadamard"}}}), "a transform_config"),
    (CT, at(f"{Q}/transform_config", [1]), "a transform_config"),
    (CT, at(f"{Q}/sparsity_config", {"format": "sparse-24-bitmask"}), "a sparsity_config: weights are stored without"),
    (CT, at(f"{Q}/sparsity_config", "2:4"), "a sparsity_config"),
    (CT_KV, at(f"{Q}/kv_cache_scheme/num_bits", 4), "a KV cache is not read"),
    (CT_KV, at(f"{Q}/kv_cache_scheme/type", "int"), "a KV cache is not read"),
]


@pytest.mark.parametrize(
    "change",
    [
        at(f"{Q}/transform_config", turned("weight_input", "weight_output")),  # lies in the weights
        at(f"{Q}/transform_config", {"config_groups": {}}),
        at(f"{Q}/transform_config", None),
        at(f"{Q}/sparsity_config", {"format": "dense", "sparsity_structure": "2:4", "global_sparsity": 0.5}),
    ],
)
def test_what_changes_no_number_is_read(change: Change, tmp_path: Path) -> None:
    assert open_checkpoint(changed(CT, tmp_path, config=change)).quantized is not None


@pytest.mark.parametrize(("name", "change", "match"), CONTRADICTIONS, ids=[m for _, _, m in CONTRADICTIONS])
def test_configs_that_contradict_the_tensors(name: str, change: Change, match: str, tmp_path: Path) -> None:
    folder = changed(name, tmp_path, config=change)
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(folder)


def test_a_wrong_group_size_in_the_second_config_file(tmp_path: Path) -> None:
    folder = changed(
        NVFP4,
        tmp_path,
        config=at(Q, None),
        hf_quant_config=at("quantization/group_size", 32),
    )
    with pytest.raises(CheckpointError, match=f"{FIRST}: nvfp4 with group_size 32 is not read"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", [NVFP4, CT])
def test_a_config_of_quantization_and_no_quantized_tensor(name: str, tmp_path: Path) -> None:
    def strip(stored: dict[str, Tensor]) -> None:
        for key in [k for k in stored if "_proj" in k]:
            del stored[key]

    with pytest.raises(CheckpointError, match="no tensor has scales"):
        open_checkpoint(changed(name, tmp_path, tensors=strip))
