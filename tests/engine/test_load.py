"""From a model folder to an engine: what is taken, what is refused and what is said."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockscale.conversion.repair.lint import lint
from blockscale.engine import load, memory
from blockscale.engine.llm import generate
from blockscale.engine.load import load_engine
from blockscale.engine.options import EngineOptions
from blockscale.engine.sampling import Sampling
from blockscale.errors import BlockscaleError, CheckpointError, EngineError, ModelError, UsageError
from blockscale.host.generate import end_ids, stored_end_ids
from blockscale.host.model import load_model, load_tokenizer
from blockscale.kernels.paged_cache import KVFormat

Find = Callable[[str], Path]
SMALL = EngineOptions(num_pages=8, max_running=2)


def changed(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy with other tensors."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        ("base_llama", None, KVFormat.BITS16),
        ("base_llama", "fp8", KVFormat.FP8),
        ("modelopt_llama_nvfp4", None, KVFormat.BITS16),
        ("modelopt_llama_nvfp4_fp8kv", None, KVFormat.FP8),
        ("modelopt_llama_nvfp4_fp8kv", "bf16", KVFormat.BITS16),
        ("ct_llama_nvfp4_fp8kv", "nvfp4", KVFormat.NVFP4),
    ],
)
def test_the_format_of_the_cache(name: str, asked: str | None, expected: KVFormat, with_tokenizer: Find) -> None:
    engine, tokenizer = load_engine(with_tokenizer(name), device="cpu", kv_cache=asked, options=SMALL)
    assert engine.model.kv_format is expected  # type: ignore[attr-defined]
    (output,) = generate(engine, [tokenizer.encode("Hello")], Sampling(5))
    assert output.usage.output_tokens == 5
    engine.check_integrity()


def test_scales_of_one_side_or_none(with_tokenizer: Find, tmp_path: Path) -> None:
    """One of a pair is refused. Without any the cache has 16 bits, or scales of 1 where it is asked for in FP8."""
    scales = ("k_scale", "v_scale")

    def drop(*endings: str) -> Callable[[dict[str, torch.Tensor]], None]:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            for name in [n for n in tensors if n.endswith(endings)]:
                del tensors[name]

        return change

    source = with_tokenizer("modelopt_llama_nvfp4_fp8kv")
    for side in scales:
        with pytest.raises(CheckpointError, match=r"a (key|value) scale without a (key|value) scale"):
            load_engine(changed(source, tmp_path / side, drop(side)), device="cpu", options=SMALL)
    bare = changed(source, tmp_path / "bare", drop(*scales))
    engine, _ = load_engine(bare, device="cpu", options=SMALL)
    assert engine.model.kv_format is KVFormat.BITS16  # type: ignore[attr-defined]
    engine, _ = load_engine(bare, device="cpu", kv_cache="fp8", options=SMALL)
    cache: Any = engine.model.allocate(1, 16)[0]
    assert (cache.format, float(cache.k_scale), float(cache.v_scale)) == (KVFormat.FP8, 1.0, 1.0)


def test_what_lint_refuses(with_tokenizer: Find, tmp_path: Path) -> None:
    """A fault that only lint sees; but not one of other engines, which give fused layers one scale."""
    source = with_tokenizer("modelopt_llama_nvfp4")
    scale = "model.layers.1.self_attn.q_proj.weight_scale_2"

    def negative(tensors: dict[str, torch.Tensor]) -> None:
        tensors[scale] = -tensors[scale]

    def doubled(tensors: dict[str, torch.Tensor]) -> None:
        tensors[scale] = 2 * tensors[scale]

    with pytest.raises(CheckpointError, match=r"bad-global-scale.*q_proj") as caught:
        load_engine(changed(source, tmp_path / "negative", negative), device="cpu", options=SMALL)
    assert "blockscale lint" in caught.value.hint
    own = changed(source, tmp_path / "doubled", doubled)
    assert any(f.name == "fused-global-scale-mismatch" for f in lint(own, quick=True).findings)
    load_engine(own, device="cpu", options=SMALL)


def test_ends_are_those_of_the_hosted_model(tiny_model: Find, tmp_path: Path) -> None:
    """From generation_config.json; without it, or where it has none, from config and tokenizer."""
    path = shutil.copytree(tiny_model("qwen3"), tmp_path / "model")
    tokenizer = load_tokenizer(path)
    for content in ({"eos_token_id": [7, 9]}, {"eos_token_id": 11}, {"do_sample": True}, None):
        file = path / "generation_config.json"
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_text(json.dumps(content))
        assert stored_end_ids(path, tokenizer) == end_ids(load_model(path).model, tokenizer)
    file.write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert stored_end_ids(path, tokenizer) == [7, 9]
    engine, _ = load_engine(path, device="cpu", options=SMALL)
    first = generate(engine, [[72, 101]], Sampling(8, ignore_eos=True))[0].token_ids
    file.write_text(json.dumps({"eos_token_id": [first[2], 10_000]}))  # the second is none of the model's
    engine, _ = load_engine(path, device="cpu", options=SMALL)
    (output,) = generate(engine, [[72, 101]], Sampling(8))
    assert output.token_ids == first[: first.index(first[2]) + 1]
    assert output.finish_reason.value == "stop"


def test_too_little_memory_says_what_would_fit(tiny_model: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_model("llama")
    size = sum(f.stat().st_size for f in path.glob("*.safetensors"))
    with pytest.raises(EngineError, match=r"64 tokens takes .* 32 tokens would fit"):
        load_engine(path, device="cpu", options=EngineOptions(num_pages=2, max_context=64))
    for share, hint in ((0.9, "quantized to fp8"), (0.1, "blockscale plan")):
        monkeypatch.setattr(load, "free_bytes", lambda device, room=int(share * size): room)
        with pytest.raises(EngineError, match=r"the weights take .* GiB, cpu has .* GiB free") as caught:
            load_engine(path, device="cpu", options=SMALL)
        assert hint in caught.value.hint


def test_out_of_memory_while_loading(tiny_model: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(load, "load_decoder", full)
    with pytest.raises(EngineError, match="cpu ran out of memory while loading") as caught:
        load_engine(tiny_model("llama"), device="cpu", options=SMALL)
    assert "quantized to fp8" in caught.value.hint


def test_free_memory_of_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files that the system keeps in memory are no obstacle: a checkpoint that was just copied fills it with them."""
    monkeypatch.setattr(memory, "_CGROUP", str(tmp_path))
    whole = memory.free_bytes(torch.device("cpu"))
    assert whole > 2**20
    for name, content in {
        "memory.max": "1000000\n",
        "memory.current": "900000\n",
        "memory.stat": "anon 200000\nactive_file 100000\ninactive_file 500000\n",
    }.items():
        (tmp_path / name).write_text(content)
    assert memory.free_bytes(torch.device("cpu")) == 700_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes(torch.device("cpu")) > 2**20


REFUSED: Mapping[str, tuple[str, Mapping[str, Any], type[BlockscaleError], str]] = {
    "cache": ("llama", {"kv_cache": "fp9"}, UsageError, "no cache in 'fp9'"),
    "device": ("llama", {"device": "tpu"}, UsageError, "'tpu' is not available"),
    "empty device": ("llama", {"device": ""}, UsageError, "'' is not available"),
    "architecture": ("cohere", {}, ModelError, "no decoder for 'cohere'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, tiny_model: Find) -> None:
    family, options, error, message = REFUSED[case]
    with pytest.raises(error, match=message) as caught:
        load_engine(tiny_model(family), **{"device": "cpu", **options})
    assert caught.value.hint


def test_folders_that_are_no_models(golden_checkpoint: Find, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such model folder"):
        load_engine(tmp_path / "none", device="cpu")
    with pytest.raises(CheckpointError, match="no model lies here"):
        load_engine(tmp_path, device="cpu")
    with pytest.raises(ModelError, match="no tokenizer"):
        load_engine(golden_checkpoint("base_llama"), device="cpu")
