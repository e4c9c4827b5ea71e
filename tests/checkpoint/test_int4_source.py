"""AWQ's and GPTQ's integers as the weights they stand for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockscale.checkpoint.reader import open_checkpoint
from blockscale.checkpoint.source import Source, open_source
from blockscale.errors import CheckpointError

from .files import model_folder, same
from .tiny_int4 import AWQ, GPTQ, awq_packed, awq_parts, draw_linear, gptq_parts, words

PROPERTY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def folder(path: Path, stored: dict[str, Tensor], quantization: dict[str, Any] | None, **config: Any) -> Path:
    model_folder(path, {"model.safetensors": stored})
    (path / "config.json").write_text(json.dumps({"model_type": "x", "quantization_config": quantization, **config}))
    return path


def view(path: Path, stored: dict[str, Tensor], quantization: dict[str, Any]) -> Source:
    """The source, in which every stored tensor stands once, and every tensor is what it announces."""
    source = open_source(folder(path, stored, quantization))
    assert sorted(info.name for t in source.tensors.values() for info in t.stored) == sorted(stored)
    for tensor in source.tensors.values():
        read = tensor.read()
        assert (read.dtype, tuple(read.shape)) == (tensor.dtype, tensor.shape)
        assert read.is_contiguous()
    return source


# ---------------------------------------------------------------- what the words mean


def test_an_awq_word_interleaves_its_columns(tmp_path: Path) -> None:
    """Columns 0 to 7 hold 0 to 7; zero points 8 to 15."""
    stored = {
        "a.qweight": words([[0x75316420]] * 2),
        "a.qzeros": words([[0xFDB9ECA8]]),
        "a.scales": torch.ones(1, 8, dtype=torch.float16),
    }
    weight = view(tmp_path, stored, {**AWQ, "group_size": -1}).tensors["a.weight"].read()
    assert weight.tolist() == [[n - (8 + n)] * 2 for n in range(8)]
    assert same(awq_packed([list(range(8))] * 2), stored["a.qweight"])


def test_a_gptq_word_counts_upwards(tmp_path: Path) -> None:
    """K from 0 to 7 hold 8 to 15, in one column; eight zero points 1 to 8 are stored as 0 to 7."""
    stored = {
        "a.qweight": words([[0xFEDCBA98] * 8]),
        "a.qzeros": words([[0x76543210]]),
        "a.scales": torch.ones(1, 8, dtype=torch.bfloat16),
        "a.g_idx": torch.zeros(8, dtype=torch.int32),
    }
    weight = view(tmp_path, stored, {**GPTQ, "group_size": -1}).tensors["a.weight"].read()
    assert weight.tolist() == [[8 + k - (1 + n) for k in range(8)] for n in range(8)]


dimensions = {
    "blocks": st.integers(1, 3),  # of N, in words
    "groups": st.integers(1, 4),
    "group_size": st.sampled_from([16, 32, 48]),
    "dtype": st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    "seed": st.integers(0, 2**32),
    "per_channel": st.booleans(),
}


@given(**dimensions)
@PROPERTY
def test_awq(
    tmp_path: Path, blocks: int, groups: int, group_size: int, dtype: torch.dtype, seed: int, per_channel: bool
) -> None:
    k = groups * group_size
    linear = draw_linear(8 * blocks, k, k if per_channel else group_size, dtype=dtype, seed=seed)
    config = {**AWQ, "group_size": -1 if per_channel else group_size}
    source = view(tmp_path, {**awq_parts(linear), "a.bias": torch.ones(8 * blocks)}, config)
    assert list(source.tensors) == ["a.bias", "a.weight"]
    assert same(source.tensors["a.weight"].read(), linear.value)


@given(
    **dimensions,
    bits=st.sampled_from([2, 4, 8]),
    version=st.sampled_from([1, 2]),
    shuffled=st.booleans(),
    symmetric=st.booleans(),
)
@PROPERTY
def test_gptq(
    tmp_path: Path,
    blocks: int,
    groups: int,
    group_size: int,
    dtype: torch.dtype,
    seed: int,
    per_channel: bool,
    bits: int,
    version: int,
    shuffled: bool,
    symmetric: bool,
) -> None:
    n, k = 32 // bits * blocks, groups * group_size
    size = k if per_channel else group_size
    linear = draw_linear(
        n, k, size, bits=bits, dtype=dtype, seed=seed, shuffled=shuffled and not per_channel, symmetric=symmetric
    )
    config = {
        **GPTQ,
        "bits": bits,
        "group_size": -1 if per_channel else group_size,
        "desc_act": shuffled,
        "sym": symmetric,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    source = view(tmp_path, {**gptq_parts(linear, version=version), "a.bias": torch.ones(n)}, config)
    assert list(source.tensors) == ["a.bias", "a.weight"]
    assert same(source.tensors["a.weight"].read(), linear.value)


@pytest.mark.parametrize("parts", [awq_parts, gptq_parts])
def test_weights_larger_than_what_is_unpacked_at_once(parts: Callable[..., Any], tmp_path: Path) -> None:
    """K x 8 values are a quarter of it, so that 40 rows take two slices, the last a part."""
    linear = draw_linear(40, 8192, 2048)
    config = {**(AWQ if parts is awq_parts else GPTQ), "group_size": 2048}
    assert same(view(tmp_path, parts(linear), config).tensors["a.weight"].read(), linear.value)


def test_what_is_not_quantized_is_itself(tmp_path: Path) -> None:
    linear = draw_linear(8, 32, 32)
    stored = {
        **awq_parts(linear, "model.layers.0.q_proj"),
        "model.layers.0.q_proj.bias": torch.rand(8).half(),
        "model.embed_tokens.weight": torch.rand(4, 32).bfloat16(),
        "lm_head.weight": torch.rand(4, 32).half(),
    }
    source = view(tmp_path, stored, {**AWQ, "modules_to_not_convert": ["lm_head"]})
    assert source.tensors.keys() == {
        "model.layers.0.q_proj.weight",
        "model.layers.0.q_proj.bias",
        "model.embed_tokens.weight",
        "lm_head.weight",
    }
    for name in stored.keys() & source.tensors.keys():
        assert source.tensors[name].is_plain
        assert same(source.tensors[name].read(), stored[name])
    assert not source.tensors["model.layers.0.q_proj.weight"].is_plain
    assert source.config == {"model_type": "x"}
    assert open_checkpoint(tmp_path).quantized is None


# ---------------------------------------------------------------- what writers do differently


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32},
        {**AWQ, "version": "GEMM"},
        {**AWQ, "version": None, "checkpoint_format": "gemm"},
    ],
)
def test_awq_configs_by_other_names(config: dict[str, Any], tmp_path: Path) -> None:
    linear = draw_linear(16, 64, 32)
    assert same(view(tmp_path, awq_parts(linear), config).tensors["a.weight"].read(), linear.value)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("stored_version", [1, 2])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
def test_symmetric_files_whose_config_names_the_other_version(
    layout: str, stored_version: int, bits: int, tmp_path: Path
) -> None:
    """Engines do not look at the zero points of symmetric files, so some are of the other version: half the range is
    what all of them mean. Without that promise the config is believed."""
    linear = draw_linear(32, 64, 32, bits=bits, symmetric=True)
    config = {**GPTQ, "bits": bits, "checkpoint_format": layout}
    stored = gptq_parts(linear, version=stored_version)
    source = view(tmp_path, stored, {**config, "sym": True})
    assert same(source.tensors["a.weight"].read(), linear.value)
    source = view(tmp_path, stored, {**config, "sym": False})
    is_believed = (layout == "gptq") == (stored_version == 1)
    assert same(source.tensors["a.weight"].read(), linear.value) == is_believed


def test_a_symmetric_promise_that_is_not_kept_changes_nothing(tmp_path: Path) -> None:
    linear = draw_linear(8, 64, 32)
    source = view(tmp_path, gptq_parts(linear), {**GPTQ, "sym": True})
    assert same(source.tensors["a.weight"].read(), linear.value)


@pytest.mark.parametrize(
    "g_idx",
    [None, torch.zeros(64, dtype=torch.int32), torch.arange(64) // 16],
    ids=["absent", "all zeros", "int64"],
)
def test_groups_without_activation_order_follow_one_another(g_idx: Tensor | None, tmp_path: Path) -> None:
    linear = draw_linear(8, 64, 16)
    stored = gptq_parts(linear)
    del stored["a.g_idx"]
    if g_idx is not None:
        stored["a.g_idx"] = g_idx
    source = view(tmp_path, stored, {**GPTQ, "group_size": 16})
    assert same(source.tensors["a.weight"].read(), linear.value)


def test_modules_may_have_bits_and_groups_of_their_own(tmp_path: Path) -> None:
    """What `dynamic` overrides shows in the shapes; without it they contradict the config."""
    usual, wide = draw_linear(8, 64, 32), draw_linear(8, 64, 16, bits=8, shuffled=True, seed=1)
    stored = {**gptq_parts(usual, "a"), **gptq_parts(wide, "b")}
    dynamic = {"+:.*b$": {"bits": 8, "group_size": 16, "desc_act": True}, "-:.*lm_head": {}}
    source = view(tmp_path, stored, {**GPTQ, "dynamic": dynamic})
    assert same(source.tensors["a.weight"].read(), usual.value)
    assert same(source.tensors["b.weight"].read(), wide.value)
    with pytest.raises(CheckpointError, match=r"'b\.qzeros' is I32"):
        open_source(folder(tmp_path, stored, GPTQ))


# ---------------------------------------------------------------- what cannot be read


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({**AWQ, "version": "gemv"}, "AWQ in the layout gemv"),
        ({**AWQ, "version": "marlin"}, "AWQ in the layout marlin"),
        ({**AWQ, "version": "gemm", "checkpoint_format": "gemv_fast"}, "AWQ in the layout gemv_fast"),
        ({**AWQ, "version": ["gemm"]}, "AWQ in the layout"),
        ({**AWQ, "bits": 8}, "AWQ of 8 bits"),
        ({**AWQ, "bits": None}, "bits None, expected an integer"),
        ({**AWQ, "bits": "4"}, "bits '4', expected an integer"),
        ({**AWQ, "group_size": None}, "group_size None, expected an integer"),
        ({**AWQ, "group_size": 0}, "K = 64, no multiple of the group size 0"),
        ({**AWQ, "group_size": -2}, "K = 64, no multiple of the group size -2"),
        ({**AWQ, "group_size": 48}, "K = 64, no multiple of the group size 48"),
        ({**AWQ, "group_size": 16}, r"'a.qzeros' is I32 \[2, 1\], expected I32 \[4, 1\]"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "GPTQ in the layout marlin"),
        ({**GPTQ, "is_marlin_format": True}, "GPTQ in the layout gptq, marlin"),
        ({**GPTQ, "format": "gptq_p"}, "GPTQ in the layout gptq_p"),
        ({**GPTQ, "checkpoint_format": "gptq", "format": "gptq_v2"}, "GPTQ in the layout gptq, gptq_v2"),
        ({**GPTQ, "rotation": "hadamard"}, "GPTQ of rotated weights"),
        ({**GPTQ, "bits": 3}, "GPTQ of 3 bits"),
        ({**GPTQ, "bits": True}, "bits True, expected an integer"),
        ({**GPTQ, "bits": 8}, r"'a.qzeros' is I32 \[2, 1\], expected I32 \[1, 2\]"),
        ({**GPTQ, "group_size": 48}, "K = 64, no multiple of the group size 48"),
        ({**GPTQ, "group_size": -1}, r"'a.qzeros' is I32 \[2, 1\], expected I32 \[1, 1\]"),
    ],
)
def test_configs_that_are_not_understood(config: dict[str, Any], match: str, tmp_path: Path) -> None:
    linear = draw_linear(8, 64, 32)
    stored = (awq_parts if config["quant_method"] == "awq" else gptq_parts)(linear)
    with pytest.raises(CheckpointError, match=match) as caught:
        open_source(folder(tmp_path, stored, config))
    assert caught.value.hint


def int32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"a.qweight": None}, "'a.qzeros' has no a.qweight"),
        ({"a.qzeros": None}, "'a.qweight' has no a.qzeros"),
        ({"a.scales": None}, "'a.qweight' has no a.scales"),
        ({"mlp.act.scales": torch.ones(64)}, "'mlp.act.scales' has no mlp.act.qweight"),
        ({"a.weight": torch.ones(8, 64)}, "'a' has both a qweight and a weight"),
        ({"a.g_idx": int32(64)}, "'a.g_idx' has no place in AWQ"),
        ({"a.qweight": int32(64)}, r"'a.qweight' is \[64\], no matrix"),
        ({"a.qweight": int32(0, 1)}, r"'a.qweight' is \[0, 1\], no matrix"),
        ({"a.qweight": int32(64, 2)}, r"'a.qweight' is I32 \[64, 2\], expected I32 \[64, 1\]"),
        ({"a.qweight": int32(8, 8)}, "K = 8, no multiple of the group size 32"),
        ({"a.qweight": int32(64, 1).short()}, r"'a.qweight' is I16 \[64, 1\], expected I32"),
        ({"a.qzeros": int32(2, 2)}, r"'a.qzeros' is I32 \[2, 2\], expected I32 \[2, 1\]"),
        ({"a.qzeros": torch.zeros(2, 1)}, r"'a.qzeros' is F32 \[2, 1\], expected I32"),
        ({"a.scales": torch.ones(1, 8).half()}, r"'a.scales' is F16 \[1, 8\], expected F16 \[2, 8\]"),
        ({"a.scales": torch.ones(2, 8, dtype=torch.float64)}, r"'a.scales' is F64 \[2, 8\], expected F16"),
        ({"a.scales": torch.ones(2, 12).half()}, r"'a.scales' is F16 \[2, 12\], expected F16 \[2, 8\]"),
        ({"a.scales": torch.ones(()).half()}, r"'a.scales' is \[\], no matrix"),
    ],
)
def test_awq_parts_that_do_not_fit(change: dict[str, Tensor | None], match: str, tmp_path: Path) -> None:
    stored = {**awq_parts(draw_linear(8, 64, 32)), **change}
    with pytest.raises(CheckpointError, match=match) as caught:
        open_source(folder(tmp_path, {n: t for n, t in stored.items() if t is not None}, AWQ))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("change", "config", "match"),
    [
        ({"a.g_idx": None}, {"desc_act": True}, "'a' has no a.g_idx, which desc_act needs"),
        ({"a.g_idx": None}, {"desc_act": None}, "'a' has no a.g_idx, which desc_act needs"),
        ({"a.g_idx": torch.zeros(64)}, {}, r"'a.g_idx' is F32 \[64\], expected I32 \[64\]"),
        ({"a.g_idx": int32(32)}, {}, r"'a.g_idx' is I32 \[32\], expected I32 \[64\]"),
        ({"a.qweight": None}, {}, "'a.g_idx' has no a.qweight"),
        ({"a.qzeros": None}, {}, "'a.qweight' has no a.qzeros"),
        ({"a.scales": None}, {}, "'a.qweight' has no a.scales"),
        ({"b.g_idx": int32(64)}, {}, "'b.g_idx' has no b.qweight"),
        ({"a.qweight": int32(8, 16)}, {}, r"'a.qweight' is I32 \[8, 16\], expected I32 \[8, 8\]"),
        ({"a.qweight": int32(8, 8).long()}, {}, r"'a.qweight' is I64 \[8, 8\], expected I32 \[8, 8\]"),
        ({"a.qzeros": int32(2)}, {}, r"'a.qzeros' is \[2\], no matrix"),
        ({"a.qzeros": int32(2, 3)}, {"dynamic": {"a": {"bits": 12}}}, "'a' in GPTQ of 12 bits"),
        ({"a.scales": torch.ones(3, 8).half()}, {"dynamic": {"a": {"bits": 8}}}, "no multiple of the group size 21"),
        ({"a.scales": torch.ones(80, 8).half()}, {"dynamic": {"a": {"bits": 8}}}, "no multiple of the group size 0"),
    ],
)
def test_gptq_parts_that_do_not_fit(
    change: dict[str, Tensor | None], config: dict[str, Any], match: str, tmp_path: Path
) -> None:
    stored = {**gptq_parts(draw_linear(8, 64, 32)), **change}
    with pytest.raises(CheckpointError, match=match) as caught:
        open_source(folder(tmp_path, {n: t for n, t in stored.items() if t is not None}, {**GPTQ, **config}))
    assert caught.value.hint


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("parts", [awq_parts, gptq_parts])
def test_scales_that_are_not_finite(parts: Callable[..., Any], value: float, tmp_path: Path) -> None:
    stored = parts(draw_linear(8, 64, 32))
    stored["a.scales"][1, 5] = value
    tensor = open_source(folder(tmp_path, stored, AWQ if parts is awq_parts else GPTQ)).tensors["a.weight"]
    with pytest.raises(CheckpointError, match=r"'a\.scales' holds NaN or Inf"):
        tensor.read()


@pytest.mark.parametrize("group", [2, -1, 2**31 - 1])
def test_groups_that_do_not_exist(group: int, tmp_path: Path) -> None:
    stored = gptq_parts(draw_linear(8, 64, 32))
    stored["a.g_idx"][7] = group
    tensor = open_source(folder(tmp_path, stored, GPTQ)).tensors["a.weight"]
    with pytest.raises(CheckpointError, match=r"'a.g_idx' names groups .*, there are 2"):
        tensor.read()


@pytest.mark.parametrize("config", [{"model_type": "gpt2"}, {"text_config": {"model_type": "gpt2"}}])
@pytest.mark.parametrize("quantization", [AWQ, GPTQ], ids=["awq", "gptq"])
def test_models_that_store_their_input_dimension_first(
    quantization: dict[str, Any], config: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="integer weights of gpt2"):
        open_source(folder(tmp_path, gptq_parts(draw_linear(8, 64, 32)), quantization, **config))


@pytest.mark.parametrize("parts", [awq_parts, gptq_parts])
def test_integers_without_a_word_in_the_config(parts: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'a.qweight' is .*config.json names no quantization"):
        open_source(folder(tmp_path, parts(draw_linear(8, 64, 32)), None))
