"""The verbs as functions: what they refuse, what they say, and that they fit together."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import blockscale
from blockscale import api
from blockscale.checkpoint.output import partial_path
from blockscale.errors import CheckFailed, CheckpointError, ModelError, RecipeError, UsageError
from blockscale.quantization.recipe import Recipe

Find = Callable[[str], Path]
FEW = {"max_calibration_tokens": 1024}


def test_names_of_the_package() -> None:
    for name in blockscale.__all__:
        assert getattr(blockscale, name) is not None
        assert name in dir(blockscale)
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        blockscale.quantise  # noqa: B018


def test_a_tensor_as_in_the_readme() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    noise = {}
    for scale in ("amax", "sweep", "four_over_six"):
        q = blockscale.quantize_tensor(weight, format="nvfp4", scale=scale)
        assert (q.packed.shape, q.block_scale.shape, q.global_scale.shape) == ((64, 64), (64, 8), ())
        assert (q.packed.dtype, q.block_scale.dtype) == (torch.uint8, torch.float8_e4m3fn)
        noise[scale] = blockscale.sqnr(weight, q.dequantize())
    assert 19 < noise["amax"] < noise["four_over_six"] < noise["sweep"] < 24
    assert blockscale.mse(weight, weight) == 0
    assert blockscale.sqnr(weight, weight) == math.inf


def test_without_calibration_text_activations_stay(with_tokenizer: Find, tmp_path: Path) -> None:
    """The same bytes as the recipe for weights only, and it is said."""
    source = with_tokenizer("base_llama")
    summary = api.quantize(source, tmp_path / "a", "nvfp4")
    assert summary.notices == (
        "no calibration text: activations stay in 16 bits (W4A16); give --calibration FILE for W4A4",
    )
    assert all(layer.activation is None for layer in summary.layers.values())
    api.quantize(source, tmp_path / "b", "nvfp4-w4a16")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-w4a16", "mxfp4"])
def test_cache_scales_need_calibration_text(recipe: str, with_tokenizer: Find, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="KV-cache scales need calibration text") as error:
        api.quantize(with_tokenizer("base_llama"), tmp_path / "q", recipe, kv_cache="fp8")
    assert "--calibration" in error.value.hint
    assert not list(tmp_path.iterdir())


def test_a_cache_without_separate_keys(tiny_model: Find, calibration_text: Path, tmp_path: Path) -> None:
    for family in ("phi3", "deepseek_v3"):
        with pytest.raises(RecipeError, match="no k_proj and v_proj"):
            api.quantize(
                tiny_model(family), tmp_path / "q", "nvfp4", calibration=[calibration_text], kv_cache="fp8", **FEW
            )


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-sweep"])
def test_own_texts_calibrate(recipe: str, with_tokenizer: Find, tmp_path: Path) -> None:
    texts = ["en-calibration", "pt-calibration"]
    summary = api.quantize(with_tokenizer("base_llama"), tmp_path / "q", recipe, calibration=texts, **FEW)
    assert all(layer.input_amax > 0 for layer in summary.layers.values())
    assert summary.notices == ()


def test_a_language_that_was_not_calibrated_is_told(with_tokenizer: Find, tmp_path: Path) -> None:
    """From the text through blockscale.json to the report, and on through a conversion."""
    options = {"calibration": ["en-calibration:0.5"], "max_calibration_tokens": 16_384, "calibration_seed": 1}
    api.quantize(with_tokenizer("base_llama"), tmp_path / "q", "nvfp4", **options)
    record = json.loads((tmp_path / "q" / "blockscale.json").read_text())
    assert record["calibration"]["seed"] == 1
    assert record["calibration"]["texts"][0]["name"] == "en-calibration"
    api.convert(tmp_path / "q", tmp_path / "ct", "compressed-tensors")
    short = {"window": 64, "max_tokens": 4096}
    for checkpoint in ("q", "ct"):
        report = api.evaluate(tmp_path / checkpoint, report=tmp_path / "page.html", **short)
        (notice,) = report.notices
        assert notice.startswith("the language of pt-evaluation was probably not calibrated")
        assert report.to_dict()["notices"] == [notice]
        assert notice[:60] in (tmp_path / "page.html").read_text()


def test_calibration_that_cannot_be(with_tokenizer: Find, golden_checkpoint: Find, tmp_path: Path) -> None:
    source, short = with_tokenizer("base_llama"), tmp_path / "short.txt"
    short.write_text("short")
    with pytest.raises(UsageError, match="shorter than one window"):
        api.quantize(source, tmp_path / "q", calibration=[short])
    with pytest.raises(UsageError, match="cannot be read"):
        api.quantize(source, tmp_path / "q", calibration=[tmp_path / "none.txt"])
    with pytest.raises(ModelError, match="no tokenizer"):
        api.quantize(golden_checkpoint("base_llama"), tmp_path / "q", calibration=["en-calibration"])
    assert [p.name for p in tmp_path.iterdir()] == ["short.txt"]


def test_a_damaged_model_leaves_nothing(with_tokenizer: Find, calibration_text: Path, write_model, tmp_path: Path):
    """Activations that are not finite end the job before anything is published."""
    import shutil

    from safetensors.torch import load_file, save_file

    source = tmp_path / "m"
    shutil.copytree(with_tokenizer("base_llama"), source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"][40] = math.inf
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="NaN or Inf on the calibration text"):
        api.quantize(source, tmp_path / "q", calibration=[calibration_text], **FEW)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "tpu", ""])
def test_devices_that_are_not_there(device: str, with_tokenizer: Find, tmp_path: Path) -> None:
    if device.startswith("cuda") and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    source = with_tokenizer("base_llama")
    for call in (
        lambda: api.quantize(source, tmp_path / "q", device=device),
        lambda: api.evaluate(source, device=device),
        lambda: api.LLM(source, device=device),
    ):
        with pytest.raises(UsageError, match="is not available") as error:
            call()
        assert "cpu" in error.value.hint
    assert not partial_path(tmp_path / "q").exists()


def test_models_that_are_not_there(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_text("x")
    for model, message in (
        (tmp_path / "none", "no such model folder"),
        ("nobody/no-such-model", "hub cannot be reached"),
        (tmp_path / "none.gguf", "no such file"),
        (file, "a model is a folder"),
        (tmp_path, r"no config\.json"),
    ):
        with pytest.raises(CheckpointError, match=message):
            api.quantize(model, tmp_path / "q", "nvfp4-w4a16")


def test_a_quantized_source_is_refused(with_tokenizer: Find, tmp_path: Path) -> None:
    api.quantize(with_tokenizer("base_llama"), tmp_path / "q", "nvfp4-w4a16")
    with pytest.raises(CheckpointError, match=r"already quantized \(modelopt\)"):
        api.quantize(tmp_path / "q", tmp_path / "r", "nvfp4-w4a16")


def test_quantize_evaluate_generate(with_tokenizer: Find, calibration_text: Path, tmp_path: Path) -> None:
    source, out = with_tokenizer("base_llama"), tmp_path / "q"
    api.quantize(source, out, "nvfp4-sweep", calibration=[calibration_text], **FEW)
    short = {"text": [calibration_text], "window": 64, "max_tokens": 512}
    report = api.evaluate(out, reference=source, **short)
    assert 0 < report.kl_mean < 1
    assert report.perplexity != report.reference_perplexity
    assert len(report.layers) == 14
    assert report.recipe.startswith("name: nvfp4-sweep")
    assert "rounded as the tensor core sees them" in report.convention
    weights_only = api.evaluate(out, reference=source, weights_only=True, **short)
    assert weights_only.kl_mean < report.kl_mean
    itself = api.evaluate(source, reference=source, **short)
    assert (itself.kl_mean, itself.top1_agreement) == (0, 1)
    with pytest.raises(CheckFailed):
        api.evaluate(out, reference=source, max_kl=report.kl_mean / 2, **short)
    assert api.evaluate(out, reference=source, max_kl=report.kl_mean * 2, **short).kl_mean == report.kl_mean

    llm = api.LLM(out)
    first, second = llm.generate(["Hello", "2 + 2 ="], max_tokens=5)
    assert (first.num_tokens, second.num_tokens) == (5, 5)
    assert llm.generate(["Hello"], max_tokens=5)[0] == first
    written: list[str] = []
    assert llm.stream("Hello", api.Sampling(5), written.append).text == "".join(written) == first.text


def test_different_tokenizers_cannot_be_compared(with_tokenizer: Find, tmp_path: Path) -> None:
    import shutil

    from tokenizers import Tokenizer

    other = tmp_path / "other"
    shutil.copytree(with_tokenizer("base_llama"), other)
    tokenizer = Tokenizer.from_file(str(other / "tokenizer.json"))
    text = tokenizer.to_str().replace('"a":97', '"a":1000').replace('"b":98', '"b":97').replace('"a":1000', '"a":98')
    (other / "tokenizer.json").write_text(text)
    with pytest.raises(UsageError, match="tokenize text differently"):
        api.evaluate(with_tokenizer("base_llama"), reference=other, text=["en-evaluation"], max_tokens=512)


_MEMORY = """
import sys
from pathlib import Path
import transformers
import blockscale.api as api
from blockscale.quantization.recipe import load_recipe
if len(sys.argv) > 1:
    api.quantize(sys.argv[1], sys.argv[2], "nvfp4-w4a16")
# not getrusage: that counts what the parent held when it forked
print(next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM")).split()[1])
"""


@pytest.mark.slow
def test_memory_stays_with_the_shard(tmp_path: Path) -> None:
    """4 GB in four shards: the peak is a small multiple of one shard, whatever the model's size."""
    import json
    import shutil

    from safetensors.torch import save_file

    source, out = tmp_path / "m", tmp_path / "q"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    n, k = 8192, 8192  # 128 MiB a tensor, eight a shard
    one = torch.randn(n, k, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    leaves = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    leaves += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.extra_proj")
    weight_map = {}
    try:
        for shard in range(4):
            file = f"model-{shard + 1:05d}-of-00004.safetensors"
            tensors = {f"model.layers.{shard}.{leaf}.weight": one.roll(i, 0) for i, leaf in enumerate(leaves)}
            save_file(tensors, source / file, {"format": "pt"})
            weight_map.update(dict.fromkeys(tensors, file))
            del tensors
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        peaks = []
        for arguments in ([], [str(source), str(out)]):
            child = subprocess.run(
                [sys.executable, "-c", _MEMORY, *arguments], capture_output=True, text=True, check=True
            )
            peaks.append(int(child.stdout) * 1024)
        assert (out / "model.safetensors").is_file()
        used, shard_bytes = peaks[1] - peaks[0], 8 * n * k * 2
        assert used <= 2.5 * shard_bytes + 400e6, f"{used / 1e9:.2f} GB for shards of {shard_bytes / 1e9:.2f} GB"
    finally:
        shutil.rmtree(source)
        shutil.rmtree(out, ignore_errors=True)


@pytest.mark.parametrize(
    ("source", "theirs", "recipe"),
    [
        ("base_llama", "modelopt_llama_nvfp4", Recipe("x", "nvfp4", "nvfp4")),
        ("base_llama", "modelopt_llama_w4a16_nvfp4", Recipe("x", "nvfp4")),
        ("base_llama", "modelopt_llama_w4a8_nvfp4_fp8", Recipe("x", "nvfp4-block32", "fp8")),
        ("base_qwen3moe", "modelopt_qwen3moe_nvfp4", Recipe("x", "nvfp4", "nvfp4")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_weights_are_model_optimizers_byte_for_byte(
    source: str,
    theirs: str,
    recipe: Recipe,
    with_tokenizer: Find,
    golden_checkpoint: Find,
    calibration_text: Path,
    tmp_path: Path,
) -> None:
    """Names, dtypes, shapes, codes and both levels of scales; only input scales depend on the text."""
    api.quantize(with_tokenizer(source), tmp_path / "q", recipe, calibration=[calibration_text])
    ours = load_file(tmp_path / "q" / "model.safetensors")
    golden = load_file(golden_checkpoint(theirs) / "model.safetensors")
    assert ours.keys() == golden.keys()
    for name, tensor in golden.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        if not name.endswith("input_scale"):
            assert torch.equal(ours[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
