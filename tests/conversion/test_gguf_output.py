"""How a GGUF file comes into being: whole or not at all, and what is refused."""

import errno
import fcntl
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from blockscale.checkpoint.reader import open_checkpoint
from blockscale.conversion.gguf.write import write_gguf
from blockscale.errors import CheckpointError, NonFiniteError, OutputError, UsageError
from tests.conversion.gguf_models import MODELS
from tests.conversion.gguf_reading import MakeModel, Quantized, write

YARN = MODELS["qwen2-yarn"][1]["rope_parameters"]
LONG = MODELS["phi3-longrope"][1]["rope_parameters"]


def test_two_writes_give_the_same_bytes(gguf_quantized: Quantized, tmp_path: Path) -> None:
    folder = gguf_quantized("qwen3", "nvfp4-w4a16")
    for name in ("a", "b"):
        write(folder, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_progress_counts_bytes_up_to_the_last(gguf_model: MakeModel, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    write_gguf(open_checkpoint(gguf_model("llama")), tmp_path / "x.gguf", lambda *step: seen.append(step))
    assert [stage for stage, _, _ in seen] == ["writing"] * len(seen)
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})
    assert seen[-1][1] == seen[-1][2]


def edit_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


@pytest.fixture
def copied(gguf_model: MakeModel, tmp_path: Path) -> MakeModel:
    """Name -> a copy of a model that a test may change."""
    return lambda name: shutil.copytree(gguf_model(name), tmp_path / "model")


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name not in ("model", "x.gguf")]


def test_an_existing_target_is_refused_and_left_alone(gguf_model: MakeModel, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_text("mine")
    with pytest.raises(OutputError, match="exists already"):
        write(gguf_model("llama"), tmp_path / "x.gguf")
    assert (tmp_path / "x.gguf").read_text() == "mine"
    (tmp_path / "link.gguf").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputError, match="exists already"):
        write(gguf_model("llama"), tmp_path / "link.gguf")


def test_a_target_that_appears_meanwhile_is_left_alone(gguf_model: MakeModel, tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"

    def appear(stage: str, done: int, total: int) -> None:
        assert not out.exists() or out.read_text() == "mine"
        out.write_text("mine")

    with pytest.raises(OutputError, match="exists already"):
        write_gguf(open_checkpoint(gguf_model("llama")), out, appear)
    assert out.read_text() == "mine"
    assert leftovers(tmp_path) == []


def test_a_failure_in_the_last_tensor_leaves_nothing(copied: MakeModel, tmp_path: Path) -> None:
    folder = copied("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"layers\.1\.mlp\.down_proj.*nan at \[3, 5\]"):
        write(folder, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken")])
def test_an_interruption_or_a_full_disk_leaves_nothing(stop: Any, gguf_model: MakeModel, tmp_path: Path) -> None:
    def fail(stage: str, done: int, total: int) -> None:
        if done > total / 2:
            raise stop

    expected = KeyboardInterrupt if stop is KeyboardInterrupt else OutputError
    with pytest.raises(expected) as caught:
        write_gguf(open_checkpoint(gguf_model("llama")), tmp_path / "x.gguf", fail)
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "x.gguf").exists()
    if expected is OutputError:
        assert "disk is full" in str(caught.value) or "broken" in str(caught.value)


def test_the_leftover_of_a_killed_run_is_overwritten(gguf_model: MakeModel, tmp_path: Path) -> None:
    (tmp_path / ".x.gguf.partial").write_bytes(b"?" * 10_000_000)
    write(gguf_model("llama"), tmp_path / "x.gguf")
    assert leftovers(tmp_path) == []
    write(gguf_model("llama"), tmp_path / "y.gguf")
    assert (tmp_path / "x.gguf").read_bytes() == (tmp_path / "y.gguf").read_bytes()


def test_two_writers_of_one_file_do_not_meet(gguf_model: MakeModel, tmp_path: Path) -> None:
    with (tmp_path / ".x.gguf.partial").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="another process"):
            write(gguf_model("llama"), tmp_path / "x.gguf")


def test_a_folder_that_cannot_be_written_is_one_error(gguf_model: MakeModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        write(gguf_model("llama"), tmp_path / "file" / "x.gguf")


def test_an_unknown_type_of_kept_matrices_is_refused(gguf_model: MakeModel, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="q4_k") as caught:
        write(gguf_model("llama"), tmp_path / "x.gguf", kept="q4_k")
    assert "q8_0" in caught.value.hint


def test_an_architecture_that_is_not_written_is_named(tiny_model: MakeModel, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'phimoe'") as caught:
        write(tiny_model("phimoe"), tmp_path / "x.gguf")
    assert "qwen3_moe" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama", {"num_attention_heads": 8, "head_dim": 32}, "makes 256 rows of queries"),
        ("llama", {"hidden_size": 64, "head_dim": 32}, "hidden_size 64"),
        ("llama", {"max_position_embeddings": None}, "transformers cannot read|max_position_embeddings is None"),
        ("llama", {"num_hidden_layers": 1}, "tensors have no place.*'model.layers.1"),
        ("llama", {"num_hidden_layers": 3}, "lacks model.layers.2.input_layernorm"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        ("qwen3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": -2.0}}, "factor.* -2.0"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("qwen3_moe", {"num_local_experts": 5, "num_experts": 5}, r"lacks model.layers.0.mlp.experts.4.gate_proj, and"),
        ("qwen3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "of a part of each head"),
        ("llama", {"tie_word_embeddings": False, "rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ("gpt_oss", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ("gemma2", {"query_pre_attn_scalar": 8}, "query_pre_attn_scalar is 8"),
        ("gemma2", {"final_logit_softcapping": None}, "final_logit_softcapping is None"),
        ("qwen2-yarn", {"rope_parameters": {**YARN, "beta_fast": 64}}, "yarn with beta_fast 64"),
        ("phi3-longrope", {"rope_parameters": {**LONG, "long_factor": [1.0]}}, "cannot read the config.*long_factor"),
    ],
)
def test_a_config_that_does_not_fit_is_one_error(
    name: str, fields: dict[str, Any], message: str, copied: MakeModel, tmp_path: Path
) -> None:
    folder = copied(name)
    edit_config(folder, **fields)
    with pytest.raises(CheckpointError, match=message) as caught:
        write(folder, tmp_path / "x.gguf")
    assert caught.value.hint
    assert not (tmp_path / "x.gguf").exists()


def test_a_tensor_that_the_graph_does_not_know_is_named(copied: MakeModel, tmp_path: Path) -> None:
    folder = copied("qwen3")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.bias"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 tensors have no place .* 'model.layers.0.self_attn.o_proj.bias'"):
        write(folder, tmp_path / "x.gguf")


def test_a_bias_of_another_size_is_named(copied: MakeModel, tmp_path: Path) -> None:
    folder = copied("qwen2")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.v_proj.bias"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"v_proj.bias \[128\] does not fit a weight \[64, 128\]"):
        write(folder, tmp_path / "x.gguf")


def test_a_copy_of_the_tied_head_is_no_tensor_of_its_own(copied: MakeModel, tmp_path: Path) -> None:
    folder = copied("qwen2")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _, file = write(folder, tmp_path / "x.gguf")
    assert "output.weight" not in file.values


def test_a_head_that_is_neither_stored_nor_tied_is_missed(copied: MakeModel, tmp_path: Path) -> None:
    """llama.cpp would take the embedding for it."""
    folder = copied("qwen2")
    edit_config(folder, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match="lacks lm_head"):
        write(folder, tmp_path / "x.gguf")


def test_a_matrix_that_is_a_vector_is_named(copied: MakeModel, tmp_path: Path) -> None:
    folder = copied("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"q_proj.weight: \[128\] is no such weight"):
        write(folder, tmp_path / "x.gguf")


def test_a_window_that_llama_cpp_does_not_keep_to_is_said(copied: MakeModel, tmp_path: Path) -> None:
    folder = copied("mistral")
    edit_config(folder, sliding_window=16)
    summary, _ = write(folder, tmp_path / "x.gguf")
    assert "16 tokens" in summary.notices[0]
