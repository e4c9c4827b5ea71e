"""From one dialect to the other and back: the same codes and block scales, the same values, and engines take both."""

from pathlib import Path

import pytest
import torch
from checkpoint.files import GOLDEN, names, same
from checkpoint.files import tensors as read_tensors
from checkpoint.loader_rules import ENGINES, Refused

from blockscale import api
from blockscale.checkpoint.dialects import compressed_tensors
from blockscale.checkpoint.linear import W4A8
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.errors import CheckpointError
from blockscale.host.model import load_model

from .folders import Stored, config, kv_scales, linears, others

REFUSED = {"modelopt_llama_nvfp4_awq_lite": "pre_quant_scale", "modelopt_llama_w4a8_nvfp4_fp8": "nvfp4-block32"}
CONVERTIBLE = [name for name in [*names("modelopt"), *names("ct")] if name not in REFUSED]
OTHER = {"modelopt": "compressed-tensors", "compressed-tensors": "modelopt"}


def dialect_of(folder: Path) -> str:
    return str(config(folder)["quantization_config"]["quant_method"])


def base_of(name: str) -> Path:
    return GOLDEN / ("base_qwen3moe" if "qwen3moe" in name else "base_llama")


def ulps(a: float, b: float) -> int:
    """Steps of fp32 between two numbers, both rounded to it."""
    first, second = (torch.tensor(x, dtype=torch.float32).view(torch.int32).item() for x in (a, b))
    return abs(int(first) - int(second))


def check_same_linears(before: dict[str, Stored], after: dict[str, Stored]) -> None:
    """Codes and scales bit for bit, and multipliers within one unit in the last place."""
    assert before.keys() == after.keys()
    for module, ours in before.items():
        theirs = after[module]
        assert same(ours.packed, theirs.packed)
        assert torch.equal(ours.unscaled, theirs.unscaled)
        if ours.block_scale.element_size() == 1:
            assert same(ours.block_scale, theirs.block_scale)
        assert ours.multipliers.keys() == theirs.multipliers.keys()
        for role, scale in ours.multipliers.items():
            assert ulps(scale, theirs.multipliers[role]) <= 1, (module, role)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Golden name -> the folder in the other dialect, and that one converted back."""
    result = {}
    for name in CONVERTIBLE:
        parent = tmp_path_factory.mktemp(name)
        dialect = dialect_of(GOLDEN / name)
        summary = api.convert(GOLDEN / name, parent / "there", OTHER[dialect])
        assert (summary.exact, summary.errors, summary.to) == (True, {}, OTHER[dialect])
        assert summary.num_linears == len(linears(GOLDEN / name))
        assert summary.num_bytes == (parent / "there" / "model.safetensors").stat().st_size
        api.convert(parent / "there", parent / "back", dialect)
        result[name] = (parent / "there", parent / "back")
    return result


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_there(name: str, converted: dict[str, tuple[Path, Path]]) -> None:
    there, _ = converted[name]
    assert dialect_of(there) == OTHER[dialect_of(GOLDEN / name)]
    check_same_linears(linears(GOLDEN / name), linears(there))
    kept = others(GOLDEN / name)
    assert others(there).keys() == kept.keys()
    assert all(same(tensor, kept[n]) for n, tensor in others(there).items())
    assert kv_scales(there) == kv_scales(GOLDEN / name)
    before, after = open_checkpoint(GOLDEN / name).quantized, open_checkpoint(there).quantized
    assert before is not None
    assert after is not None
    assert {n: x.scheme for n, x in after.linears.items()} == {n: x.scheme for n, x in before.linears.items()}
    assert after.kv_format == before.kv_format


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_and_back(name: str, converted: dict[str, tuple[Path, Path]]) -> None:
    """The peer's own names, dtypes but for scales that were bf16, and bytes but for reciprocals."""
    _, back = converted[name]
    original, returned = read_tensors(GOLDEN / name), read_tensors(back)
    assert returned.keys() == original.keys()
    check_same_linears(linears(GOLDEN / name), linears(back))
    for key, tensor in original.items():
        if "global_scale" in key or "weight_scale_2" in key or "input_scale" in key:
            assert (returned[key].dtype, returned[key].shape) == (tensor.dtype, tensor.shape)
            assert ulps(tensor.item(), returned[key].item()) <= 1
        elif tensor.dtype == torch.bfloat16 and returned[key].dtype == torch.float32:
            assert key.endswith("_scale")  # llm-compressor's scales of FP8 rows and of the KV cache
            assert same(tensor.float(), returned[key])
        else:
            assert same(tensor, returned[key]), key
    theirs, ours = config(GOLDEN / name), config(back)
    plain = {k: v for k, v in theirs.items() if k != "quantization_config"}
    assert {k: v for k, v in ours.items() if k != "quantization_config"} == plain
    files = {path.name for path in (GOLDEN / name).iterdir()} - {"recipe.yaml"}
    assert {path.name for path in back.iterdir()} == files | {"blockscale.json"}


def engines_that_take(folder: Path, base: Path) -> set[str]:
    found = set()
    for engine, load in ENGINES.items():
        try:
            load(folder, base)
        except Refused:
            continue
        found.add(engine)
    return found


@pytest.mark.parametrize(
    ("name", "engines"),
    {
        "modelopt_llama_nvfp4": {"vLLM", "SGLang", "TensorRT-LLM"},
        "modelopt_llama_nvfp4_four_over_six": {"vLLM", "SGLang", "TensorRT-LLM"},
        "modelopt_llama_nvfp4_fp8kv": {"vLLM", "SGLang", "TensorRT-LLM"},
        "modelopt_llama_w4a16_nvfp4": {"vLLM", "SGLang"},
        "modelopt_qwen3moe_nvfp4": {"vLLM", "SGLang", "TensorRT-LLM"},
        "ct_llama_nvfp4": {"vLLM", "SGLang", "TensorRT-LLM"},
        "ct_llama_nvfp4_fp8kv": {"vLLM", "SGLang", "TensorRT-LLM"},
        "ct_llama_nvfp4a16": {"vLLM", "SGLang", "TensorRT-LLM"},
        "ct_llama_fp8_dynamic": {"vLLM"},
        "ct_llama_mxfp4": set(),
    }.items(),
)
def test_engines_take_the_result(name: str, engines: set[str], converted: dict[str, tuple[Path, Path]]) -> None:
    assert engines_that_take(converted[name][0], base_of(name)) == engines


IDS = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_logits_are_the_same(name: str, converted: dict[str, tuple[Path, Path]]) -> None:
    """Bit for bit where every multiplier came back from its reciprocal. Where one moved by a unit in the last place, a
    value that an activation's rounding happens to split may move by a step: then only the weights are looked at."""
    there, _ = converted[name]
    before, after = linears(GOLDEN / name), linears(there)
    is_same = all(
        ulps(scale, after[module].multipliers[role]) == 0
        for module, linear in before.items()
        for role, scale in linear.multipliers.items()
    )
    first, second = (load_model(folder, emulate_activations=is_same).logits(IDS) for folder in (GOLDEN / name, there))
    assert first.abs().max() > 0.1
    if is_same:
        assert torch.equal(first, second)
    else:  # 14 layers' weights, each of a relative error of 2^-23, through sums of some hundred products
        assert (first - second).abs().max() <= 2.0**-15 * first.abs().max()


def test_a_config_is_not_written_for_what_the_dialect_cannot_hold() -> None:
    with pytest.raises(CheckpointError, match="a: compressed-tensors cannot hold nvfp4-block32"):
        compressed_tensors.config_files({}, {"a": W4A8}, [], None)
