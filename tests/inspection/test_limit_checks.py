"""Dimensions against tiles and against a number of GPUs."""

from pathlib import Path
from typing import Any

import pytest

from blockscale.errors import UsageError
from blockscale.inspection.checks.limits import limit_faults
from blockscale.inspection.reading import read_folder

from .readings import INNER, LLAMA, MOE, WIDTH, compressed, ends, found, fp8, llama, modelopt, moe, nvfp4, without

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
P = "model.layers.1"
DOWN, OUT = f"{P}.mlp.down_proj", f"{P}.self_attn.o_proj"


@pytest.mark.parametrize("folder", sorted(path for path in GOLDEN.iterdir() if path.is_dir()), ids=lambda p: p.name)
@pytest.mark.parametrize("gpus", [1, 2])
def test_nothing_is_wrong_with_golden_checkpoints(folder: Path, gpus: int) -> None:
    assert list(limit_faults(read_folder(folder), gpus)) == []


@pytest.mark.parametrize("gpus", [0, -1])
def test_a_number_of_gpus_that_is_none(gpus: int) -> None:
    with pytest.raises(UsageError, match="GPUs"):
        list(limit_faults(modelopt(llama()), gpus))


# ---------------------------------------------------------------- tiles


@pytest.mark.parametrize(("k", "is_odd"), [(16, True), (32, False), (48, True), (4304, True), (4288, False)])
def test_columns_of_4bit_weights(k: int, is_odd: bool) -> None:
    entries = ends() | nvfp4(DOWN, WIDTH, k)
    assert found(limit_faults(modelopt(entries))) == [("untileable-dimension", DOWN)] * is_odd


@pytest.mark.parametrize("n", [1, 80, 164, 4304])
def test_rows_of_4bit_weights_are_padded(n: int) -> None:
    assert list(limit_faults(modelopt(ends() | nvfp4(DOWN, n, WIDTH)))) == []


@pytest.mark.parametrize(("n", "k", "is_odd"), [(64, 64, False), (64, 72, True), (72, 64, True), (16, 16, False)])
def test_fp8_tiles_both(n: int, k: int, is_odd: bool) -> None:
    reading = modelopt(ends() | fp8(DOWN, n, k), quantization={"quant_algo": "FP8"}, nested={"quant_algo": "FP8"})
    assert found(limit_faults(reading)) == [("untileable-dimension", DOWN)] * is_odd


def test_rows_of_a_fused_layer_count_together() -> None:
    entries = ends() | fp8(f"{P}.mlp.gate_proj", 24, WIDTH) | fp8(f"{P}.mlp.up_proj", 24, WIDTH)
    algorithm = {"quant_algo": "FP8"}
    assert list(limit_faults(modelopt(entries, quantization=algorithm, nested=algorithm))) == []


def test_experts_have_kernels_of_their_own() -> None:
    entries = ends() | nvfp4(f"{P}.mlp.experts.0.down_proj", WIDTH, 48)
    assert list(limit_faults(modelopt(entries, config=MOE))) == []


# ---------------------------------------------------------------- shards


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (1, []),
        (2, []),  # K = 64 / 2
        (4, [("untileable-dimension", OUT)]),  # K = 64 / 4: one block, half a tile
        (8, [("unshardable-dimension", OUT)]),  # K = 64 / 8: half a block
    ],
)
def test_columns_of_what_comes_last(gpus: int, expected: list[tuple[str, str]]) -> None:
    config = {**LLAMA, "num_attention_heads": 8}
    entries = ends() | nvfp4(OUT, WIDTH, 64) | nvfp4(f"{P}.self_attn.q_proj", WIDTH, 64)
    assert found(limit_faults(modelopt(entries, config=config), gpus)) == expected


def test_blocks_of_32_are_not_cut_either() -> None:
    entries = {f"{DOWN}.weight_packed": ("U8", (WIDTH, 48)), f"{DOWN}.weight_scale": ("U8", (WIDTH, 3))}
    reading = compressed(ends() | entries)
    assert reading.model is not None
    assert reading.model.linears[DOWN].scheme.weight.block_size == 32
    assert found(limit_faults(reading, 2)) == [("unshardable-dimension", DOWN)]


@pytest.mark.parametrize(("gpus", "is_odd"), [(2, False), (3, True), (4, False)])
def test_rows_of_what_comes_first(gpus: int, is_odd: bool) -> None:
    config = {**LLAMA, "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 192}
    entries = ends() | nvfp4(f"{P}.mlp.up_proj", 128, WIDTH)
    expected = [("unshardable-dimension", f"{P}.mlp.up_proj")] * is_odd
    assert found(limit_faults(modelopt(entries, config=config), gpus)) == expected


@pytest.mark.parametrize(
    ("counts", "gpus", "what"),
    [
        ({"num_attention_heads": 4}, 8, "4 attention heads"),
        ({"num_attention_heads": 9}, 2, "9 attention heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "3 key-value heads"),
        ({"num_attention_heads": 24, "num_key_value_heads": 4}, 6, "4 key-value heads"),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 8, None),  # copied to each
        ({"num_attention_heads": 6, "num_key_value_heads": 6, "vocab_size": 248320}, 6, "a vocabulary of 248320"),
        ({"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 50257}, 8, None),  # padded to 50304
        ({"num_attention_heads": "8", "num_key_value_heads": None, "vocab_size": -1}, 8, None),
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_counts_of_the_config(counts: dict[str, Any], gpus: int, what: str | None, is_nested: bool) -> None:
    config = {"text_config": counts} if is_nested else counts
    faults = list(limit_faults(modelopt(ends() | nvfp4(f"{P}.x_proj", WIDTH, WIDTH), config=config), gpus))
    assert found(faults) == ([] if what is None else [("unshardable-dimension", "config.json")])
    assert what is None or what in faults[0].message


def test_experts_can_be_split_otherwise() -> None:
    config = {**MOE, "num_attention_heads": 16, "num_key_value_heads": 16}
    faults = list(limit_faults(modelopt(without(moe(), f"{P}."), config=config), 16))
    assert all(fault.rule == "unshardable-dimension" for fault in faults)
    by_place = {fault.where: fault for fault in faults}
    expert = by_place["model.layers.0.mlp.experts.2.down_proj"]
    assert f"K = {INNER} over 16 GPUs cuts a block of 16" in expert.message
    assert "expert parallel" in expert.hint


def test_a_16bit_model_has_no_limits() -> None:
    assert list(limit_faults(read_folder(GOLDEN / "base_llama"), 7)) == []
