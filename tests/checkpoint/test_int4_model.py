"""A whole model in AWQ's and GPTQ's integers is quantized like the one that they stand for."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from blockscale import api
from blockscale.checkpoint.source import open_source
from blockscale.cli.main import main

from .files import model_folder, same, tensors
from .tiny_int4 import AWQ, GPTQ, awq_parts, draw_linear, gptq_parts

Find = Callable[[str], Path]


@dataclass(frozen=True)
class Pair:
    """The same model twice: in integers, and the weights that those stand for."""

    integers: Path
    plain: Path


@pytest.fixture(scope="module", params=["awq", "gptq"])
def pair(request: pytest.FixtureRequest, tiny_model: Find, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tiny llama whose linears, but not its head, are packed; GPTQ's in activation order."""
    model = tiny_model("llama")
    integers, plain, others = {}, {}, {}
    is_gptq = request.param == "gptq"
    dtype = torch.bfloat16 if is_gptq else torch.float16  # the rest of the model is bf16
    for seed, (name, tensor) in enumerate(sorted(tensors(model).items())):
        if name.endswith("_proj.weight"):
            linear = draw_linear(*tensor.shape, 32, dtype=dtype, seed=seed, shuffled=is_gptq)
            integers.update((gptq_parts if is_gptq else awq_parts)(linear, name.removesuffix(".weight")))
            plain[name] = linear.value
        else:
            others[name] = tensor
    quantization = {**GPTQ, "desc_act": True} if is_gptq else AWQ
    config = json.loads((model / "config.json").read_text())
    parent = tmp_path_factory.mktemp(request.param)
    configs = {"integers": {**config, "quantization_config": quantization}, "plain": config}
    for name, linears in (("integers", integers), ("plain", plain)):  # files apart: both have the linears first
        shards = {"model-1.safetensors": linears, "model-2.safetensors": others}
        weight_map = {key: file for file, shard in shards.items() for key in shard}
        path = model_folder(parent / name, shards, weight_map)
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            (path / file).write_bytes((model / file).read_bytes())
        (path / "config.json").write_text(json.dumps(configs[name]))
    for file in ("quant_config.json", "quantize_config.json"):
        (parent / "integers" / file).write_text(json.dumps(quantization))
    return Pair(parent / "integers", parent / "plain")


def written(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_whole_model_is_the_one_it_stands_for(pair: Pair) -> None:
    source, plain = open_source(pair.integers), open_source(pair.plain)
    assert source.config == plain.config
    assert source.tensors.keys() == plain.tensors.keys()
    assert sum(not tensor.is_plain for tensor in source.tensors.values()) == 2 * 7
    assert all(same(tensor.read(), plain.tensors[name].read()) for name, tensor in source.tensors.items())
    assert {file.name for file in source.companions} == {file.name for file in plain.companions}


def test_it_is_quantized_to_the_same_bytes(pair: Pair, tmp_path: Path) -> None:
    for name, model in (("a", pair.integers), ("b", pair.plain)):
        assert main(["quantize", str(model), str(tmp_path / name), "--recipe", "nvfp4-w4a16-sweep"]) == 0
    assert written(tmp_path / "a") == written(tmp_path / "b")
    stored = tensors(tmp_path / "a")
    assert sum(tensor.dtype == torch.uint8 for tensor in stored.values()) == 2 * 7
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "modelopt"


def test_it_is_calibrated_to_the_same_bytes(pair: Pair, calibration_text: Path, tmp_path: Path) -> None:
    """The model's own class runs on the decoded weights: activations and cache have the same scales."""
    for name, model in (("a", pair.integers), ("b", pair.plain)):
        api.quantize(
            model,
            tmp_path / name,
            "nvfp4",
            calibration=[calibration_text],
            max_calibration_tokens=512,
            keep=["*down_proj"],
            kv_cache="fp8",
        )
    assert written(tmp_path / "a") == written(tmp_path / "b")
    stored = tensors(tmp_path / "a")
    assert sum(name.endswith("input_scale") for name in stored) == 2 * 6
    kept = "model.layers.0.mlp.down_proj.weight"
    assert same(stored[kept], tensors(pair.plain)[kept])
