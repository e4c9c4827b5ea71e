"""Layer-wise methods from end to end, on tiny models of every architecture."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_configs import _SEEING, _TEXT

import blockscale as bs
from blockscale.checkpoint.groups import fused_groups
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.checkpoint.shards import read_json
from blockscale.formats.spec import NVFP4

from ..test_walk import small_model
from .running import quantize, stored_linears, windows

Find = Callable[[str], Path]


def problems(folder: Path, *expected: str) -> list[str]:
    """What lint says of it, but for remarks and the rules that are expected."""
    findings = [f for f in bs.lint(folder).findings if f.severity != "info" and not f.rule.startswith(expected)]
    return [f"{f.rule} {f.layer}: {f.message}" for f in findings]


@pytest.mark.parametrize("family", [*_TEXT, *_SEEING])
def test_best_writes_a_checkpoint_that_lints_clean(family: str, tiny_model: Find, tmp_path: Path) -> None:
    summary = quantize(tiny_model(family), tmp_path / "out", ids=windows(9, 16))
    assert problems(tmp_path / "out") == []
    layers = read_json(tmp_path / "out" / "blockscale.json")["layers"]
    stored = stored_linears(tmp_path / "out")
    assert set(layers) == set(summary.layers) == set(stored)
    judged = [layer for layer in layers.values() if layer["gain"] is not None]
    assert all(layer["gain"] >= 0 for layer in judged), "never worse than round to nearest"
    assert len(judged) > len(layers) / 2
    for members in fused_groups(stored).values():
        assert len({stored[m].weight.global_scale.item() for m in members}) == 1
        assert len({stored[m].input_global_scale.item() for m in members}) == 1
    for linear in stored.values():
        assert torch.isfinite(linear.weight.dequantize(torch.float32)).all()


def test_through_the_front_door(tiny_model: Find, calibration_text: Path, tmp_path: Path) -> None:
    """On a text, and evaluated: nearer to the 16-bit model than round to nearest."""
    model, kl = tiny_model("llama"), {}
    for recipe in ("nvfp4", "nvfp4-best", "nvfp4-best-arc", "nvfp4-svdquant", "nvfp4-w4a16-best"):
        out = tmp_path / recipe
        summary = bs.quantize(model, out, recipe, calibration=[calibration_text], max_calibration_tokens=2048)
        assert problems(out) == []
        assert summary.notices == ()
        report = bs.evaluate(out, reference=model, text=[calibration_text], window=64, max_tokens=512)
        kl[recipe] = report.kl_mean
    assert max(kl, key=lambda name: kl[name]) == "nvfp4"
    assert kl["nvfp4-best-arc"] < kl["nvfp4-best"] < 0.8 * kl["nvfp4"]
    assert kl["nvfp4-w4a16-best"] < kl["nvfp4-best"]
    record = json.loads((tmp_path / "nvfp4-best" / "blockscale.json").read_text())
    assert record["activation_scale"] == "four_over_six"
    assert record["layers"]["model.layers.0.mlp.down_proj"]["chosen"]


def test_experts_that_no_token_reaches(tiny_model: Find, tmp_path: Path) -> None:
    """One token all through: two of four experts see it."""
    found = quantize(tiny_model("qwen3_moe"), tmp_path / "out", ids=torch.full((2, 8), 40))
    assert problems(tmp_path / "out") == []
    unreached = [n.partition(":")[0] for n in found.notices if "no calibration token reached it" in n][:-1]
    assert len(unreached) == 2 * 2 * 3
    stored = stored_linears(tmp_path / "out")
    for name, linear in stored.items():
        scale, own = linear.input_global_scale.item(), found.layers[name].input_amax
        assert 0 < scale < 1
        assert own is not None
        if name in unreached:
            layer, leaf = name.split(".experts.")[0], name.rpartition(".")[2]
            siblings = [n for n in stored if n.startswith(layer + ".experts.") and n.endswith(leaf)]
            reached = [stored[n].input_global_scale.item() for n in siblings if n not in unreached]
            assert scale == pytest.approx(max(reached), rel=1e-6)


@pytest.mark.parametrize(("count", "length"), [(1, 1), (1, 8), (2, 8), (9, 1)])
def test_hardly_any_text(count: int, length: int, tiny_model: Find, tmp_path: Path) -> None:
    found = quantize(tiny_model("llama"), tmp_path / "out", ids=windows(count, length))
    assert problems(tmp_path / "out") == []
    assert found.notices == (), "every linear saw a token"
    for linear in stored_linears(tmp_path / "out").values():
        assert torch.isfinite(linear.weight.dequantize(torch.float32)).all()
        assert torch.isfinite(1 / linear.input_global_scale)


def test_inputs_that_are_zero_throughout(tmp_path: Path) -> None:
    """Values are projected to nothing, so o_proj is given zeros."""
    from safetensors.torch import load_file, save_file

    path = small_model(tmp_path / "m", "llama")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"].zero_()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    found = quantize(path, tmp_path / "out")
    assert found.notices[0] == "model.layers.1.self_attn.o_proj: its inputs were all zero; its input scale is 1"
    assert len(found.notices) == 2, "and what the zeros hide from the search for folds"
    linear = stored_linears(tmp_path / "out")["model.layers.1.self_attn.o_proj"]
    assert linear.input_global_scale == 1
    assert found.layers["model.layers.1.self_attn.v_proj"].sqnr_db is None, "zeros have no ratio"
    assert json.loads((tmp_path / "out" / "blockscale.json").read_text(), parse_constant=pytest.fail)
    assert problems(tmp_path / "out") == []


ODD = {"hidden_size": 80, "intermediate_size": 104, "head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}


def test_odd_shapes_ties_and_biases(tmp_path: Path) -> None:
    """What 16 does not divide is kept; what precedes it is smoothed all the same where it may be."""
    path = small_model(tmp_path / "m", "llama", **ODD)
    found = quantize(path, tmp_path / "out", "nvfp4-best-arc", ids=windows(9, 16))
    assert [n.partition(":")[0] for n in found.notices] == [
        f"model.layers.{i}.mlp.down_proj stays in 16 bits" for i in range(2)
    ]
    assert problems(tmp_path / "out", "BS501") == []
    linears = stored_linears(tmp_path / "out")
    assert len(linears) == 12
    assert linears["model.layers.0.self_attn.q_proj"].residual is not None
    assert len(linears["model.layers.0.self_attn.q_proj"].residual.channels) == 64
    assert open_checkpoint(tmp_path / "out").folder.config["tie_word_embeddings"]


def test_stacked_hidden_states(tmp_path: Path) -> None:
    """Gemma 3n's layers take four of them, and share keys and values."""
    sizes = {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 32,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 32,
    }
    path = small_model(tmp_path / "m", "gemma3n_text", **sizes)
    quantize(path, tmp_path / "out", ids=windows(9, 40))
    linears = stored_linears(tmp_path / "out")
    assert all(linear.scheme.weight is NVFP4 for linear in linears.values())
    assert "model.layers.3.mlp.down_proj" in linears
