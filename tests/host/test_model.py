"""Hosted models against transformers' own, for every family that differs in names, experts, attention or norms."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families.published import with_mxfp4_experts, without_computed_buffers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from blockscale import api
from blockscale.algorithms.fake_quantize import round_activation
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.errors import ModelError
from blockscale.formats.spec import NVFP4
from blockscale.formats.tensor import encode
from blockscale.host.linear import KeptLinear, PackedLinear
from blockscale.host.model import load_model, load_tokenizer
from blockscale.host.skeleton import build_skeleton, decoder_layers, load_config
from blockscale.host.weights import host_weights, materialize
from blockscale.quantization.recipe import Recipe, Rule

from .dequantized import dequantized_copy, transformers_logits

Find = Callable[[str], Path]
CHECKPOINTS = Path(__file__).parents[1] / "golden" / "checkpoints"
FAMILIES = (
    "llama",
    "mixtral",
    "gemma3_text",
    "gemma4_text",
    "qwen2",
    "qwen3",
    "phi3",
    "phimoe",
    "llama4_text",
    "deepseek_v3",
    "gpt_oss",
    "nemotron_h",
    "bamba",
    "jamba",
    "falcon_h1",
    "gemma3",
    "qwen3_vl",
)


def token_ids(vocabulary: int = 128) -> Tensor:
    """Longer than the tiny models' sliding windows; without the tokens that stand for images."""
    return torch.randint(vocabulary - 2, (2, 24), generator=torch.Generator().manual_seed(1))


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", ["base_llama", "base_qwen3moe"])
def test_golden_models_are_exact(name: str, golden_checkpoint: Find) -> None:
    path = golden_checkpoint(name)
    assert torch.equal(load_model(path).logits(token_ids(256)), transformers_logits(path, token_ids(256)))


PEERS = sorted(p.name for p in CHECKPOINTS.iterdir() if p.is_dir() and not p.name.startswith("base_"))


@pytest.mark.parametrize("name", PEERS)
def test_checkpoints_of_other_tools(name: str, golden_checkpoint: Find, tmp_path: Path) -> None:
    """Every dialect and scheme they write: the same as transformers on the decoded weights, and close to the source."""
    path = golden_checkpoint(name)
    found = load_model(path, emulate_activations=False).logits(token_ids(256))
    expected = transformers_logits(dequantized_copy(path, tmp_path / "plain"), token_ids(256))
    assert relative(found, expected) < 1e-5
    source = transformers_logits(golden_checkpoint(f"base_{name.split('_')[1]}"), token_ids(256))
    emulated = relative(load_model(path).logits(token_ids(256)), source)
    assert relative(found, source) <= emulated < 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_exact(family: str, tiny_model: Find) -> None:
    path = tiny_model(family)
    found = load_model(path).logits(token_ids())
    assert found.std() > 0.1
    assert torch.equal(found, transformers_logits(path, token_ids()))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_of_families(family: str, tiny_model: Find, tmp_path: Path) -> None:
    """Quantized, loaded packed and run: the same as transformers on the decoded weights."""
    source, out = tiny_model(family), tmp_path / "q"
    summary = api.quantize(source, out, "nvfp4-w4a16")
    assert summary.notices == ()
    found = load_model(out).logits(token_ids())
    plain = dequantized_copy(out, tmp_path / "plain")
    expected = transformers_logits(plain, token_ids())
    assert relative(found, expected) < 1e-5
    cost = relative(found, transformers_logits(source, token_ids()))
    assert 0.01 < cost < 0.8


@pytest.mark.parametrize("family", FAMILIES)
def test_calibrated_families(family: str, tiny_model: Find, tmp_path: Path, calibration_text: Path) -> None:
    source, out = tiny_model(family), tmp_path / "q"
    summary = api.quantize(source, out, "nvfp4", calibration=[calibration_text], max_calibration_tokens=2048)
    assert all(layer.input_amax for layer in summary.layers.values())
    weights_only = load_model(out, emulate_activations=False).logits(token_ids())
    found = load_model(out).logits(token_ids())
    reference = transformers_logits(source, token_ids())
    assert relative(weights_only, found) > 0.01, "activations are not rounded"
    assert relative(found, reference) < 2.5 * relative(weights_only, reference)


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_w4a4_rounds_what_each_linear_is_given(
    family: str, tiny_model: Find, tmp_path: Path, calibration_text: Path
) -> None:
    source, out = tiny_model(family), tmp_path / "q"
    api.quantize(source, out, "nvfp4", calibration=[calibration_text], max_calibration_tokens=1024)
    scales = {n: t for n, t in load_file(out / "model.safetensors").items() if n.endswith(".input_scale")}

    def round_inputs(model: nn.Module) -> None:
        def hook(scale: Tensor) -> Callable:
            def rounded(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                values, factor = round_activation(args[0], NVFP4, scale)
                return (values * factor,)

            return rounded

        for name, module in model.named_modules():
            if f"{name}.input_scale" in scales:
                module.register_forward_pre_hook(hook(scales[f"{name}.input_scale"]))

    assert len(scales) == sum(1 for _ in open_checkpoint(out).quantized.linears)
    expected = transformers_logits(dequantized_copy(out, tmp_path / "plain"), token_ids(), round_inputs)
    # an input close to a rounding boundary may fall on its other side
    assert relative(load_model(out).logits(token_ids()), expected) < 0.02


@pytest.mark.parametrize("recipe", ["mxfp4", "fp8"])
@pytest.mark.parametrize("name", ["base_llama", "base_qwen3moe"])
def test_dynamic_recipes(recipe: str, name: str, with_tokenizer: Find, tmp_path: Path) -> None:
    source, out = with_tokenizer(name), tmp_path / "q"
    api.quantize(source, out, recipe)
    reference = transformers_logits(source, token_ids(256))
    weights_only = load_model(out, emulate_activations=False).logits(token_ids(256))
    expected = transformers_logits(dequantized_copy(out, tmp_path / "plain"), token_ids(256))
    assert relative(weights_only, expected) < 1e-5
    found = load_model(out).logits(token_ids(256))
    limit = {"mxfp4": 0.5, "fp8": 0.08}[recipe]
    assert relative(weights_only, reference) < relative(found, reference) < limit


def test_both_dialects_run_alike(tiny_model: Find, tmp_path: Path, calibration_text: Path) -> None:
    logits = []
    for dialect in ("modelopt", "compressed-tensors"):
        out = tmp_path / dialect
        api.quantize(
            tiny_model("llama"),
            out,
            "nvfp4",
            calibration=[calibration_text],
            max_calibration_tokens=1024,
            kv_cache="fp8",
            dialect=dialect,
        )
        logits.append(load_model(out).logits(token_ids()))
    # the stored reciprocal of a scale can move it by one unit in the last place
    assert relative(*logits) < 0.01


@pytest.mark.parametrize("kv_format", ["fp8", "nvfp4"])
def test_the_cache_is_rounded(kv_format: str, tiny_model: Find, tmp_path: Path, calibration_text: Path) -> None:
    """Against transformers with an attention of the test's own that rounds keys and values."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    source, out = tiny_model("llama"), tmp_path / "q"
    options = {"calibration": [calibration_text], "max_calibration_tokens": 1024}
    api.quantize(source, out, "nvfp4-w4a16", kv_cache=kv_format, **options)
    scales = load_file(out / "model.safetensors")

    def rounded(x: Tensor, scale: Tensor) -> Tensor:
        if kv_format == "fp8":
            return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        return encode(x, NVFP4, global_scale=scale).dequantize()

    def attention(module, query, key, value, mask, **kwargs):
        prefix = f"model.layers.{module.layer_idx}.self_attn"
        key = rounded(key, scales[f"{prefix}.k_proj.k_scale"])
        value = rounded(value, scales[f"{prefix}.v_proj.v_scale"])
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("rounding_of_the_test", attention)
    AttentionMaskInterface.register("rounding_of_the_test", sdpa_mask)
    plain = dequantized_copy(out, tmp_path / "plain")
    expected = transformers_logits(plain, token_ids(), lambda m: m.set_attn_implementation("rounding_of_the_test"))
    found = load_model(out).logits(token_ids())
    assert relative(found, expected) < 0.01
    without = load_model(out, emulate_activations=False).logits(token_ids())
    assert relative(found, without) > {"fp8": 0.01, "nvfp4": 0.03}[kv_format]
    assert relative(without, transformers_logits(plain, token_ids())) < 1e-5


def test_gpt_oss_in_mxfp4(tiny_model: Find, tmp_path: Path, calibration_text: Path) -> None:
    import transformers

    source = with_mxfp4_experts(tiny_model("gpt_oss"), tmp_path / "mxfp4")
    decoded = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, quantization_config=transformers.Mxfp4Config(dequantize=True)
    ).float()  # transformers 5.17 decodes to bf16 whatever is asked for
    with torch.inference_mode():
        expected = decoded(input_ids=token_ids(), use_cache=False).logits
    assert torch.equal(load_model(source).logits(token_ids()), expected)
    out = tmp_path / "q"
    summary = api.quantize(source, out, "nvfp4", calibration=[calibration_text], max_calibration_tokens=1024)
    assert summary.layers["model.layers.1.mlp.experts.gate_up_proj"].input_amax
    # every MXFP4 number is close to an NVFP4 number: requantizing the experts costs little by itself
    only_experts = tmp_path / "experts"
    api.quantize(source, only_experts, "nvfp4-w4a16", keep=["*.self_attn.*"])
    assert relative(load_model(only_experts).logits(token_ids()), expected) < 0.2


def test_packed_stays_packed(tiny_model: Find, tmp_path: Path) -> None:
    """Weights take the checkpoint's bytes; only what is no linear layer is widened to fp32 on the CPU."""
    out = tmp_path / "q"
    api.quantize(tiny_model("mixtral"), out, "nvfp4-w4a16")
    model = load_model(out).model
    packed = [m for m in model.modules() if isinstance(m, PackedLinear)]
    stored = open_checkpoint(out)
    linears = stored.quantized.linears.values()
    in_file = sum(info.num_bytes for linear in linears for info in linear.tensors.values())
    assert len(packed) == len(linears)
    assert sum(m.linear.weight.num_bytes for m in packed) == in_file
    held = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    linear_16bit = sum(m.weight.numel() * 2 for m in model.modules() if isinstance(m, KeptLinear))
    kept_in_file = sum(tensor.num_bytes for tensor in stored.kept.values())
    assert sum(held.values()) == linear_16bit + 2 * (kept_in_file - linear_16bit)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def test_a_tied_head_shares_memory(tiny_model: Find, tmp_path: Path) -> None:
    out = tmp_path / "q"
    api.quantize(tiny_model("qwen2"), out, "nvfp4-w4a16")
    assert "lm_head.weight" not in open_checkpoint(out).kept
    model = load_model(out).model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_quantized_head_runs(family: str, tiny_model: Find, tmp_path: Path) -> None:
    """Also where the source ties it to the embedding and stores it all the same."""
    source = tmp_path / "m"
    shutil.copytree(tiny_model(family), source)
    tensors = load_file(source / "model.safetensors")
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "q"
    api.quantize(source, out, Recipe("x", "nvfp4", rules=(Rule("lm_head", "nvfp4"),)))
    hosted = load_model(out)
    assert isinstance(hosted.model.lm_head, PackedLinear)
    expected = transformers_logits(dequantized_copy(out, tmp_path / "plain"), token_ids())
    assert relative(hosted.logits(token_ids()), expected) < 1e-5


@pytest.mark.parametrize("family", ["mixtral", "phimoe"])
def test_a_quantized_router_runs(family: str, tiny_model: Find, tmp_path: Path) -> None:
    """It is no plain linear layer in transformers: its weight is decoded when it is loaded."""
    out = tmp_path / "q"
    names = open_checkpoint(tiny_model(family)).kept
    rules = tuple(Rule(name, "nvfp4") for name in names if name.endswith(("gate.weight", "router.weight")))
    assert len(api.quantize(tiny_model(family), out, Recipe("x", "nvfp4", rules=rules)).layers) == 34
    expected = transformers_logits(dequantized_copy(out, tmp_path / "plain"), token_ids())
    assert relative(load_model(out).logits(token_ids()), expected) < 1e-5


def edited(source: Path, target: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.self_attn.k_proj.bias",
        "model.norm.weight",
    ],
)
def test_a_missing_weight_is_named(name: str, tiny_model: Find, tmp_path: Path) -> None:
    path = edited(tiny_model("qwen2"), tmp_path / "m", lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"lacks 1 weights of Qwen2ForCausalLM, first '{name}'") as error:
        load_model(path)
    assert error.value.hint


def test_a_missing_head_is_named_unless_it_is_tied(tiny_model: Find, tmp_path: Path) -> None:
    path = edited(tiny_model("llama"), tmp_path / "m", lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"first 'lm_head\.weight'"):
        load_model(path)


def test_a_missing_buffer_is_named_if_it_was_learned(tiny_model: Find, tmp_path: Path) -> None:
    learned = "model.layers.1.mlp.gate.e_score_correction_bias"
    path = edited(tiny_model("deepseek_v3"), tmp_path / "m", lambda tensors: tensors.pop(learned))
    with pytest.raises(ModelError, match=f"lacks 1 weights of DeepseekV3ForCausalLM, first '{learned}'"):
        load_model(path)


def test_a_buffer_that_follows_from_the_config_is_computed_or_read(tiny_model: Find, tmp_path: Path) -> None:
    """The decays of linear attention: some files have them, in bf16 like the rest."""
    path = without_computed_buffers(tiny_model("minimax"), tmp_path / "m")
    computed = load_model(path).logits(token_ids())
    assert torch.equal(computed, transformers_logits(path, token_ids()))
    read = load_model(tiny_model("minimax")).logits(token_ids())
    assert torch.equal(read, transformers_logits(tiny_model("minimax"), token_ids()))
    assert 0 < relative(read, computed) < 0.01


@pytest.mark.parametrize("family", ["qwen2", "llama4"])
def test_weights_under_another_root(family: str, tiny_model: Find, tmp_path: Path) -> None:
    """Of a model's body alone, and of the language model inside a larger one."""
    path = tiny_model(family)
    inner = {"qwen2": "model.", "llama4": "language_model."}[family]

    def strip(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.startswith(inner)]:
            tensors[name.removeprefix(inner)] = tensors.pop(name)

    assert any(name.startswith(inner) for name in load_file(path / "model.safetensors"))
    other = edited(path, tmp_path / "m", strip)
    found = load_model(other).logits(token_ids())
    assert torch.equal(found, load_model(path).logits(token_ids()))
    assert torch.equal(found, transformers_logits(path, token_ids()))


def test_a_missing_expert_is_named(tiny_model: Find, tmp_path: Path) -> None:
    missing = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    path = edited(tiny_model("mixtral"), tmp_path / "m", lambda tensors: tensors.pop(missing))
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts\.2\.w3\.weight"):
        load_model(path)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_weight_of_another_shape_is_named(name: str, tiny_model: Find, tmp_path: Path) -> None:
    def cut(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][:-8].contiguous()

    path = edited(tiny_model("llama"), tmp_path / "m", cut)
    with pytest.raises(ModelError, match=name.removesuffix(".weight")):
        load_model(path)


def test_an_unknown_architecture(tiny_model: Find, tmp_path: Path) -> None:
    """The hint leads to what works: recipes without calibration need no model class."""
    path = tmp_path / "m"
    shutil.copytree(tiny_model("llama"), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "llama_9000", "architectures": ["X"]}))
    with pytest.raises(ModelError, match="transformers cannot read the config") as error:
        load_model(path)
    assert "nvfp4-w4a16" in error.value.hint
    out = tmp_path / "q"
    assert len(api.quantize(path, out, "nvfp4-w4a16").layers) == 14
    known = tmp_path / "known"
    api.quantize(tiny_model("llama"), known, "nvfp4-w4a16")
    assert (out / "model.safetensors").read_bytes() == (known / "model.safetensors").read_bytes()


def test_a_model_without_a_language_head(tmp_path: Path) -> None:
    import transformers

    transformers.ViTConfig(hidden_size=32).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no language model for 'vit'") as error:
        build_skeleton(load_config(tmp_path), torch.float32)
    assert "without calibration" in error.value.hint


def test_skeletons_hold_nothing_but_computed_buffers(tiny_model: Find) -> None:
    for family in ("llama", "gemma3_text", "gemma4_text", "falcon_h1"):
        model = build_skeleton(load_config(tiny_model(family)), torch.float32)
        assert all(p.is_meta for p in model.parameters())
        prefix, layers = decoder_layers(model)
        assert (prefix, len(layers)) == ("model.layers", 2)
        computed = [b for m in model.modules() for n, b in m.named_buffers(recurse=False) if not b.is_meta]
        assert computed
        assert all(torch.isfinite(b).all() for b in computed)


def test_a_buffer_that_nobody_computes_is_an_error(tiny_model: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory would be whatever lay there before."""
    from transformers import LlamaPreTrainedModel

    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", lambda self, module: None)
    with pytest.raises(ModelError, match=r"no way is known to compute 'model\.rotary_emb\.\w+'"):
        build_skeleton(load_config(tiny_model("llama")), torch.float32)


def test_tokenizers(tiny_model: Find, tmp_path: Path, golden_checkpoint: Find) -> None:
    assert load_tokenizer(tiny_model("llama")).encode("AZ") == [65, 90]
    with pytest.raises(ModelError, match="no tokenizer") as error:
        load_tokenizer(golden_checkpoint("base_llama"))
    assert "tokenizer.json" in error.value.hint
    broken = tmp_path / "m"
    shutil.copytree(tiny_model("llama"), broken)
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="no tokenizer"):
        load_tokenizer(broken)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text", "gemma3", "qwen3", "phi3", "deepseek_v3"])
def test_looking_at_the_cache_changes_nothing(family: str, tiny_model: Find) -> None:
    """Whatever attention a model chooses by itself, sinks and windows included, still runs."""
    path = tiny_model(family)
    model = build_skeleton(load_config(path), torch.float32, with_kv_transforms=True)
    materialize(model, host_weights(model, open_checkpoint(path), is_emulating=False))
    model.tie_weights()
    with torch.inference_mode():
        found = model(input_ids=token_ids(), use_cache=False).logits
    assert torch.equal(found, load_model(path).logits(token_ids()))


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_cache_scales_reach_the_layers_they_were_measured_in(
    family: str, tiny_model: Find, tmp_path: Path, calibration_text: Path
) -> None:
    """Also where the model names its modules otherwise than the checkpoint does."""
    out = tmp_path / "q"
    api.quantize(tiny_model(family), out, "nvfp4", calibration=[calibration_text], kv_cache="fp8")
    hosted = load_model(out)
    assert hosted.checkpoint.quantized is not None
    transforms = [m for m in hosted.model.modules() if getattr(m, "kv_transform", None) is not None]
    assert len(transforms) == len(hosted.checkpoint.quantized.kv_tensors) > 0
    assert torch.isfinite(hosted.logits(token_ids())).all()
