"""From a folder to a folder: the same bytes as tensor by tensor, nothing lost, and nothing left behind by an error."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockscale import api
from blockscale.checkpoint.folder import open_folder
from blockscale.checkpoint.groups import group_name
from blockscale.checkpoint.load import load_linear
from blockscale.checkpoint.output import partial_path
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.checkpoint.source import open_source
from blockscale.errors import BlockscaleError, CheckpointError, NonFiniteError, OutputError, RecipeError
from blockscale.formats.spec import FORMATS
from blockscale.formats.tensor import decode
from blockscale.quantization.plan import make_plan
from blockscale.quantization.recipe import KEEP, RECIPES, Recipe, Rule
from blockscale.quantization.statistics import ActivationStatistics
from blockscale.quantization.units import input_scale, kv_scales
from blockscale.quantization.weight import quantize_tensor

from .sources import llama, moe

Find = Callable[[str], Path]
CONFIG = {"model_type": "llama", "dtype": "bfloat16", "num_hidden_layers": 2}
W4A16 = "nvfp4-w4a16"


def drawn(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Every tensor of its own size, so that a scale taken from the wrong one shows."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: (torch.randn(shape, generator=generator) * 0.02 * (1 + i % 7)).to(dtype)
        for i, (name, shape) in enumerate(shapes.items())
    }


def spread(tensors: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Neighbours in different shards."""
    names = list(tensors)
    return [{name: tensors[name] for name in names[i::count]} for i in range(count)]


def all_files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def read_all(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("recipe", [W4A16, "nvfp4-w4a16-sweep"])
def test_the_bytes_of_each_tensor_alone(recipe: str, shards: int, write_model, tmp_path: Path) -> None:
    """With the largest magnitude of its fused group, whichever shards the members lie in."""
    tensors = drawn(llama(2))
    source = write_model(CONFIG, spread(tensors, shards))
    summary = api.quantize(source, tmp_path / "q", recipe)
    written = read_all(tmp_path / "q")
    method = RECIPES[recipe].scale
    amax: dict[str, float] = {}
    for module in summary.layers:
        name = group_name(module)
        amax[name] = max(amax.get(name, 0.0), tensors[f"{module}.weight"].abs().amax().item())
    assert len(amax) == 2 * 4
    for module in summary.layers:
        bound = 6 * (448 if method == "amax" else 256)
        shared = torch.tensor(amax[group_name(module)]) / bound
        expected = quantize_tensor(tensors[f"{module}.weight"], scale=method, global_scale=shared)
        assert torch.equal(written.pop(f"{module}.weight_scale_2"), shared)
        assert torch.equal(written.pop(f"{module}.weight"), expected.packed)
        found = written.pop(f"{module}.weight_scale")
        assert torch.equal(found.view(torch.uint8), expected.block_scale.view(torch.uint8))
    kept = {name: t for name, t in tensors.items() if name.removesuffix(".weight") not in summary.layers}
    assert written.keys() == kept.keys()
    assert all(torch.equal(written[name], t) for name, t in kept.items())


def test_shards_do_not_matter(write_model, tmp_path: Path) -> None:
    tensors = drawn(llama(2))
    results = []
    for count in (1, 3, 5):
        api.quantize(write_model(CONFIG, spread(tensors, count), f"m{count}"), tmp_path / f"q{count}", W4A16)
        tensors_of = read_all(tmp_path / f"q{count}")
        results.append({n: t.reshape(-1).view(torch.uint8).tolist() for n, t in tensors_of.items()})
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_source_types(dtype: torch.dtype, write_model, tmp_path: Path) -> None:
    tensors = drawn(llama(1), dtype)
    source = write_model({**CONFIG, "dtype": str(dtype)[6:]}, [tensors])
    api.quantize(source, tmp_path / "q", W4A16)
    written = read_all(tmp_path / "q")
    assert written["model.norm.weight"].dtype == dtype
    assert torch.equal(written["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    expected = quantize_tensor(tensors["model.layers.0.self_attn.o_proj.weight"])
    assert torch.equal(written["model.layers.0.self_attn.o_proj.weight"], expected.packed)


@pytest.mark.parametrize("weight", ["nvfp4", "mxfp4", "fp8", "fp8-channel"])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_formats_and_dialects_hold_the_same_numbers(weight: str, dialect: str, write_model, tmp_path: Path) -> None:
    tensors = drawn(llama(1))
    activation = {"fp8-channel": "fp8-token"}.get(weight)
    recipe = Recipe("x", weight, activation, dialect=dialect)
    if (weight, dialect) == ("fp8", "modelopt"):
        with pytest.raises(CheckpointError, match="no name for fp8/16-bit"):
            api.quantize(write_model(CONFIG, [tensors]), tmp_path / "q", recipe)
        return
    api.quantize(write_model(CONFIG, [tensors]), tmp_path / "q", recipe)
    checkpoint = open_checkpoint(tmp_path / "q")
    for module, stored in checkpoint.quantized.linears.items():
        found = load_linear(stored, torch.bfloat16).weight
        scale = found.global_scale
        expected = quantize_tensor(tensors[f"{module}.weight"], weight, global_scale=scale)
        if dialect == "modelopt" or scale is None:
            assert torch.equal(decode(found), decode(expected))
        else:  # stored as a reciprocal: one unit in the last place
            assert torch.allclose(decode(found), decode(expected), rtol=1e-6, atol=0)


def test_every_tensor_is_accounted_for(write_model, tmp_path: Path) -> None:
    """Odd ones too: biases, scalars, integers, empty tensors, a draft layer, a vision tower."""
    tensors = drawn(moe(4)) | {
        "model.layers.0.self_attn.q_proj.bias": torch.randn(64).to(torch.bfloat16),
        "model.layers.1.eh_proj.weight": torch.randn(64, 128).to(torch.bfloat16),
        "mtp.layers.0.mlp.up_proj.weight": torch.randn(64, 64).to(torch.bfloat16),
        "visual.blocks.0.attn.qkv.weight": torch.randn(64, 64).to(torch.bfloat16),
        "model.layers.0.mlp.gate.e_score_correction_bias": torch.randn(4),
        "model.layers.0.mixer.conv1d.weight": torch.randn(64, 1, 4).to(torch.bfloat16),
        "model.buffer": torch.arange(5),
        "model.scalar": torch.tensor(3.5),
        "model.nothing": torch.empty(0, 16),
        "model.flags": torch.tensor([True, False]),
    }
    config = {**CONFIG, "num_hidden_layers": 1, "num_experts": 4}
    summary = api.quantize(write_model(config, spread(tensors, 3)), tmp_path / "q", W4A16)
    written = read_all(tmp_path / "q")
    quantized = {f"{module}.weight" for module in summary.layers}
    assert len(quantized) == 4 + 3 * 4
    parts = {f"{m}.{p}" for m in summary.layers for p in ("weight", "weight_scale", "weight_scale_2")}
    assert written.keys() == parts | (tensors.keys() - quantized)
    for name in tensors.keys() - quantized:
        assert written[name].dtype == tensors[name].dtype
        assert torch.equal(written[name], tensors[name])
    assert summary.kept.keys() == {name.removesuffix(".weight") for name in tensors.keys() - quantized}
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    ignored = config["quantization_config"]["ignore"]
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.1*", "mtp*", "visual*"} <= set(ignored)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("recipe", [W4A16, "nvfp4-w4a16-sweep", "mxfp4", "fp8"])
def test_a_weight_that_is_not_finite(recipe: str, bad: float, write_model, tmp_path: Path) -> None:
    tensors = drawn(llama(2))
    tensors["model.layers.1.mlp.up_proj.weight"][13, 7] = bad
    source = write_model(CONFIG, spread(tensors, 2))
    before = all_files(tmp_path)
    with pytest.raises(NonFiniteError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: \S+ at \[13, 7\]"):
        api.quantize(source, tmp_path / "q", recipe)
    assert all_files(tmp_path) == before, "an error leaves something behind"
    with pytest.raises(NonFiniteError, match=r"up_proj\.weight: \S+ at \[13, 7\]"):  # kept in 16 bits it is as broken
        api.quantize(source, tmp_path / "q", recipe, keep=["model.layers.1"])
    assert all_files(tmp_path) == before


def test_an_existing_output_is_left_alone(write_model, tmp_path: Path) -> None:
    source = write_model(CONFIG, [drawn(llama(1))])
    out = tmp_path / "q"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(OutputError, match="exists already"):
        api.quantize(source, out, W4A16)
    assert all_files(out) == {"mine.txt": b"mine"}
    (out / "mine.txt").unlink()
    api.quantize(source, out, W4A16)
    with pytest.raises(OutputError, match="exists already"):
        api.quantize(source, out, W4A16)
    with pytest.raises(OutputError, match="exists already"):
        api.quantize(source, source, W4A16)


def test_same_job_same_bytes(write_model, tmp_path: Path) -> None:
    source = write_model(CONFIG, spread(drawn(llama(2)), 2))
    for name in ("a", "b"):
        api.quantize(source, tmp_path / name, W4A16)
    assert all_files(tmp_path / "a") == all_files(tmp_path / "b")


def test_the_record(write_model, tmp_path: Path) -> None:
    """blockscale.json: enough to make the checkpoint again, and what each layer cost."""
    tensors = drawn(llama(1))
    rules = (Rule("*.o_proj", "fp8-channel", "fp8-token"), Rule("*.mlp.*", KEEP))
    recipe = Recipe("mine", "nvfp4", keep=("*.zzz",), rules=rules)
    with pytest.raises(RecipeError, match=r"'\*\.zzz' matches no module"):
        api.quantize(write_model(CONFIG, [tensors]), tmp_path / "q", recipe)
    recipe = Recipe("mine", "nvfp4", rules=rules, dialect="compressed-tensors")
    source = tmp_path / "model"
    api.quantize(source, tmp_path / "q", recipe)
    record = json.loads((tmp_path / "q" / "blockscale.json").read_text())
    assert record["calibration_digest"] is None
    assert {"blockscale", "torch", "transformers"} <= record.keys()
    (tmp_path / "again.yaml").write_text(record["recipe"])
    api.quantize(source, tmp_path / "again", tmp_path / "again.yaml")
    assert all_files(tmp_path / "again") == all_files(tmp_path / "q")
    layers = record["layers"]
    assert layers.keys() == {f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qkvo"}
    o_proj, q_proj = (layers[f"model.layers.0.self_attn.{leaf}_proj"] for leaf in "oq")
    assert (o_proj["format"], o_proj["activation"]) == ("fp8-channel", "fp8-token")
    assert (q_proj["format"], q_proj["activation"], q_proj["shape"]) == ("nvfp4", None, [64, 64])
    for module, layer in layers.items():
        weight = tensors[f"{module}.weight"]
        stored = open_checkpoint(tmp_path / "q").quantized.linears[module]
        error = decode(load_linear(stored, torch.float32).weight).double() - weight.double()
        sqnr = -10 * math.log10((error.square().sum() / weight.double().square().sum()).item())
        assert layer["sqnr_db"] == pytest.approx(sqnr, abs=0.001)


def test_the_summary(write_model, tmp_path: Path) -> None:
    tensors = drawn(llama(2))
    summary = api.quantize(write_model(CONFIG, [tensors]), tmp_path / "q", W4A16)
    assert summary.source_bytes == sum(t.numel() * 2 for t in tensors.values())
    assert summary.num_parameters == sum(t.numel() for t in tensors.values())
    assert summary.num_bytes == sum(p.stat().st_size for p in (tmp_path / "q").glob("*.safetensors"))
    in_file = open_folder(tmp_path / "q").num_bytes
    assert summary.bits_per_parameter == pytest.approx(8 * in_file / summary.num_parameters)
    assert summary.out == tmp_path / "q"
    json.dumps(summary.to_dict())


def test_progress_reaches_its_end(write_model, tmp_path: Path) -> None:
    seen = []
    source = write_model(CONFIG, [drawn(llama(2))])
    api.quantize(source, tmp_path / "q", W4A16, progress=lambda *a: seen.append(a))
    stages, done, totals = zip(*seen, strict=True)
    assert set(stages) == {"quantizing"}
    assert len(set(totals)) == 1
    assert list(done) == sorted(done)
    assert done[-1] == totals[-1] == open_folder(source).num_bytes


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("magnitude", [0.0, 1e-43, 1e-38, 1e-30, 1e30])
def test_weights_of_any_size_read_back(magnitude: float, dialect: str, write_model, tmp_path: Path) -> None:
    """Global scales are stored as they are or as reciprocals: neither may become 0 or infinite."""
    tensors = drawn(llama(1), torch.float32)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        weight = tensors[f"model.layers.0.self_attn.{name}.weight"]
        weight.mul_(magnitude / weight.abs().amax())
    api.quantize(write_model(CONFIG, [tensors]), tmp_path / "q", W4A16, dialect=dialect)
    for module, stored in open_checkpoint(tmp_path / "q").quantized.linears.items():
        values = decode(load_linear(stored, torch.float32).weight)
        assert torch.isfinite(values).all()
        weight = tensors[f"{module}.weight"]
        if weight.abs().amax() > 1e-33:
            assert (values - weight).abs().max() < 0.2 * weight.abs().max()


@pytest.mark.parametrize(
    ("recipe", "dialect", "message"),
    [
        (Recipe("x", "mxfp8"), "modelopt", "no name for mxfp8/16-bit"),
        (Recipe("x", "int4-g32"), "modelopt", "no name for int4-g32/16-bit"),
        (Recipe("x", "int4-g32"), "compressed-tensors", "cannot hold int4-g32"),
        (Recipe("x", "nvfp4-block32"), "compressed-tensors", "cannot hold nvfp4-block32"),
        (Recipe("x", "fp8-block128"), "compressed-tensors", "cannot hold fp8-block128"),
    ],
)
def test_what_a_dialect_cannot_hold_is_said_first(
    recipe: Recipe, dialect: str, message: str, write_model, tmp_path: Path
) -> None:
    source = write_model(CONFIG, [drawn({k: (256, 256) if len(v) == 2 else v for k, v in llama(1).items()})])
    with pytest.raises(CheckpointError, match=message):
        api.quantize(source, tmp_path / "q", recipe, dialect=dialect, progress=lambda *a: pytest.fail("work was done"))
    assert not partial_path(tmp_path / "q").exists()


def test_a_quantized_head(write_model, tmp_path: Path) -> None:
    tensors = drawn(llama(1))
    source = write_model({**CONFIG, "tie_word_embeddings": True}, [tensors])
    api.quantize(source, tmp_path / "q", Recipe("x", "nvfp4", rules=(Rule("lm_head", "nvfp4"),)))
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert "lm_head" not in config["quantization_config"]["ignore"]
    assert config["tie_word_embeddings"] is False, "loaders would put the embedding in its place"
    assert "lm_head" in open_checkpoint(tmp_path / "q").quantized.linears


def test_a_tied_head_stays_as_it_is(write_model, tmp_path: Path) -> None:
    tensors = drawn(llama(1))
    del tensors["lm_head.weight"]
    source = write_model({**CONFIG, "tie_word_embeddings": True}, [tensors])
    api.quantize(source, tmp_path / "q", W4A16)
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert not any("lm_head" in name for name in read_all(tmp_path / "q"))
    with pytest.raises(RecipeError, match="'lm_head' matches no module"):
        api.quantize(source, tmp_path / "r", Recipe("x", "nvfp4", rules=(Rule("lm_head", "nvfp4"),)))


@pytest.mark.parametrize(
    ("dialect", "fp8"), [("modelopt", ("fp8", "fp8")), ("compressed-tensors", ("fp8-channel", "fp8-token"))]
)
def test_mixed_formats(
    dialect: str, fp8: tuple[str, str], with_tokenizer: Find, calibration_text: Path, tmp_path: Path
) -> None:
    recipe = Recipe("x", "nvfp4", rules=(Rule("*.self_attn.*", *fp8),), dialect=dialect)
    options = {"calibration": [calibration_text], "max_calibration_tokens": 1024}
    api.quantize(with_tokenizer("base_qwen3moe"), tmp_path / "q", recipe, **options)
    linears = open_checkpoint(tmp_path / "q").quantized.linears
    assert linears["model.layers.0.self_attn.q_proj"].scheme.weight is FORMATS[fp8[0]]
    assert linears["model.layers.0.mlp.experts.3.up_proj"].scheme.weight is FORMATS["nvfp4"]
    assert len(linears) == 2 * 16


def test_strict(write_model, tmp_path: Path) -> None:
    tensors = drawn(llama(1) | {"model.layers.0.mlp.down_proj.weight": (64, 60)})
    source = write_model(CONFIG, [tensors])
    with pytest.raises(RecipeError, match="K = 60"):
        api.quantize(source, tmp_path / "q", W4A16, strict=True)
    summary = api.quantize(source, tmp_path / "q", W4A16)
    assert "down_proj stays in 16 bits" in summary.notices[0]


def test_a_written_folder_that_is_not_what_was_planned(
    write_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is read back before it gets its name."""
    from blockscale.checkpoint.dialects import modelopt

    honest = modelopt.config_files

    def forgetful(*args, **kwargs):
        files = honest(*args, **kwargs)
        config = json.loads(files["config.json"])
        config["quantization_config"]["quant_algo"] = "MXFP4"
        return {**files, "config.json": json.dumps(config)}

    monkeypatch.setattr(modelopt, "config_files", forgetful)
    with pytest.raises(RecipeError, match=r"does not read back|not what was planned"):
        api.quantize(write_model(CONFIG, [drawn(llama(1))]), tmp_path / "q", W4A16)
    assert {p.name for p in tmp_path.iterdir()} == {"model"}


def test_calibrated_scales(with_tokenizer: Find, calibration_text: Path, tmp_path: Path) -> None:
    """One input scale for what shares an input, from the largest magnitude; cache scales from amax / 448."""
    out = tmp_path / "q"
    options = {"calibration": [calibration_text], "max_calibration_tokens": 2048, "kv_cache": "fp8"}
    summary = api.quantize(with_tokenizer("base_llama"), out, "nvfp4", **options)
    written = read_all(out)
    for module, layer in summary.layers.items():
        assert written[f"{module}.input_scale"].item() == pytest.approx(layer.input_amax / 2688, rel=1e-6)
    attention = "model.layers.1.self_attn"
    assert len({written[f"{attention}.{leaf}_proj.input_scale"].item() for leaf in "qkv"}) == 1
    for name in ("k_proj.k_scale", "v_proj.v_scale"):
        assert (written[f"{attention}.{name}"].shape, written[f"{attention}.{name}"].dtype) == ((), torch.float32)
        assert 0 < written[f"{attention}.{name}"] < 1
    record = json.loads((out / "blockscale.json").read_text())
    assert record["num_calibration_tokens"] == 2048
    assert len(record["calibration_digest"]) == 16
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}


def test_no_cache_scales_for_what_text_does_not_reach(
    with_tokenizer: Find, calibration_text: Path, tmp_path: Path
) -> None:
    """A vision tower or a draft layer may have a k_proj and a v_proj too."""
    source = tmp_path / "m"
    shutil.copytree(with_tokenizer("base_llama"), source)
    extra = {
        f"{prefix}.self_attn.{leaf}_proj.weight": torch.ones(64, 64, dtype=torch.bfloat16)
        for prefix in ("vision_tower.encoder.layers.0", "model.layers.2")
        for leaf in "kv"
    }
    save_file({**load_file(source / "model.safetensors"), **extra}, source / "model.safetensors", {"format": "pt"})
    options = {"calibration": [calibration_text], "max_calibration_tokens": 512, "kv_cache": "fp8"}
    api.quantize(source, tmp_path / "q", W4A16, **options)
    attentions = [name for name in read_all(tmp_path / "q") if name.endswith("k_scale")]
    assert attentions == [f"model.layers.{i}.self_attn.k_proj.k_scale" for i in range(2)]


def test_a_source_in_fp8_tiles(write_model, tmp_path: Path) -> None:
    """Weights published in FP8 are quantized from what they stand for."""
    tensors = drawn(llama(1))
    expected = {}
    for name in [n for n in tensors if "_proj" in n]:
        q = quantize_tensor(tensors.pop(name), "fp8-block128")
        tensors[name], tensors[f"{name}_scale_inv"] = q.packed, q.block_scale
        expected[name] = q.dequantize(torch.bfloat16)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    api.quantize(write_model({**CONFIG, "quantization_config": quantization}, [tensors]), tmp_path / "q", W4A16)
    written = read_all(tmp_path / "q")
    for name in ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        assert torch.equal(written[name], quantize_tensor(expected[name]).packed)
    assert not any("scale_inv" in name for name in written)


def test_searched_activation_scales_have_headroom(with_tokenizer: Find, calibration_text: Path, tmp_path: Path) -> None:
    """A block may then take a scale 448/256 above that of its amax, which E4M3 must be able to hold."""
    file = tmp_path / "searched.yaml"
    file.write_text("{name: searched, weight: nvfp4, activation: nvfp4, activation_scale: four_over_six}")
    out = tmp_path / "q"
    summary = api.quantize(
        with_tokenizer("base_llama"), out, file, calibration=[calibration_text], max_calibration_tokens=512
    )
    written = read_all(out)
    for module, layer in summary.layers.items():
        expected = layer.input_amax / (6 * 256)
        assert written[f"{module}.input_scale"].item() == pytest.approx(expected, rel=1e-6)


def test_a_group_shares_the_largest_input_scale(
    with_tokenizer: Find, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members that share an input were seen to share its range, but nothing forces a statistic to say so."""

    def invented(checkpoint, data, linears, **options) -> ActivationStatistics:
        return ActivationStatistics({module: 1.0 + i for i, module in enumerate(linears)})

    monkeypatch.setattr(api, "calibrate", invented)
    source, out = with_tokenizer("base_llama"), tmp_path / "q"
    summary = api.quantize(source, out, "nvfp4", calibration=[calibration_text], max_calibration_tokens=512)
    order = list(make_plan(open_source(source), RECIPES["nvfp4"]).linears)
    written = read_all(out)
    for module in summary.layers:
        largest = max(1.0 + i for i, m in enumerate(order) if group_name(m) == group_name(module))
        assert written[f"{module}.input_scale"].item() == pytest.approx(largest / 2688, rel=1e-6)


def test_a_linear_without_statistics_is_an_error(
    with_tokenizer: Find, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A default scale would make engines answer nonsense."""

    def forgetful(checkpoint, data, linears, **options) -> ActivationStatistics:
        return ActivationStatistics({m: 1.0 for m in linears if not m.endswith("down_proj")})

    monkeypatch.setattr(api, "calibrate", forgetful)
    with pytest.raises(RecipeError, match="down_proj: no activation statistics"):
        api.quantize(
            with_tokenizer("base_llama"), tmp_path / "q", calibration=[calibration_text], max_calibration_tokens=512
        )
    assert not list(tmp_path.iterdir())


def test_scales_that_engines_can_invert() -> None:
    nvfp4, fp8 = FORMATS["nvfp4"], FORMATS["fp8"]
    assert input_scale(2688.0, nvfp4).item() == 1.0
    assert input_scale(448.0, fp8).item() == 1.0
    for amax in (0.0, 1e-45, 1e-40, 1e-36, 1e30):
        for fmt in (nvfp4, fp8):
            scale = input_scale(amax, fmt)
            assert torch.isfinite(scale.reciprocal())
            assert scale > 0
    assert input_scale(0.0, nvfp4).item() == 1.0
    scales = kv_scales((0.0, 448.0))
    assert (scales.key.item(), scales.value.item()) == (1.0, 1.0)
    assert torch.isfinite(kv_scales((1e-40, 1e-44)).key.reciprocal())


def test_the_model_of_nobody_is_an_error(tmp_path: Path) -> None:
    for missing in (tmp_path / "none", "./none"):
        with pytest.raises(BlockscaleError, match="none"):
            api.quantize(missing, tmp_path / "q", W4A16)
