"""A GGUF file as the 16-bit folder that it stands for."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from blockscale.cache_folder import cache_folder
from blockscale.checkpoint import gguf_import
from blockscale.checkpoint.folder import open_folder
from blockscale.checkpoint.gguf_import import import_gguf
from blockscale.checkpoint.locate import demo_gguf
from blockscale.errors import CheckpointError, MissingDependencyError

from .files import same
from .tiny_gguf import HEADS, HIDDEN, LAYERS, TOKENS, Stored, llama_tensors, phi3_tensors, write_gguf

TYPES = gguf.GGMLQuantizationType


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLOCKSCALE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def check_equal(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(same(found[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize(
    "matrix_type", [TYPES.F32, TYPES.F16, TYPES.BF16, TYPES.Q8_0, TYPES.Q4_0], ids=lambda t: t.name
)
def test_a_llama_model_is_itself_again(matrix_type: gguf.GGMLQuantizationType, tmp_path: Path, cache: Path) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf", llama_tensors(), matrix_type=matrix_type)
    folder = import_gguf(tmp_path / "tiny.gguf")
    assert folder.parent == cache
    check_equal(folder, weights)
    config = open_folder(folder).config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert (config["hidden_size"], config["num_hidden_layers"], config["num_key_value_heads"]) == (HIDDEN, LAYERS, 2)
    assert config["tie_word_embeddings"] is False


def test_rows_are_dequantized_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_import, "_SLICE_BYTES", 150)
    weights = write_gguf(tmp_path / "tiny.gguf", llama_tensors(), matrix_type=TYPES.Q8_0)
    check_equal(import_gguf(tmp_path / "tiny.gguf"), weights)


def test_a_tied_head_has_no_tensor(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf", llama_tensors(is_tied=True))
    folder = import_gguf(tmp_path / "tiny.gguf")
    check_equal(folder, weights)
    assert open_folder(folder).config["tie_word_embeddings"] is True


def test_it_runs_and_its_tokenizer_reads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_gguf(tmp_path / "tiny.gguf", llama_tensors())
    folder = import_gguf(tmp_path / "tiny.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(range(len(TOKENS))) == TOKENS
    ids = tokenizer("ab", return_tensors="pt")["input_ids"]
    assert AutoModelForCausalLM.from_pretrained(folder)(ids).logits.shape[-1] == len(TOKENS)


def test_no_path_of_this_machine_is_left_in_it(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", llama_tensors())
    folder = import_gguf(tmp_path / "tiny.gguf")
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    for path in folder.glob("*.json"):
        assert str(tmp_path) not in path.read_text()


def test_it_is_made_once_and_again_when_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, llama_tensors())
    first = import_gguf(path)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert import_gguf(path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    os.utime(path, ns=(1, 1))
    assert import_gguf(path) != first
    shutil.copy(path, tmp_path / "other.gguf")
    assert import_gguf(tmp_path / "other.gguf").name.startswith("other-")


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == Path(os.environ["BLOCKSCALE_CACHE"])
    monkeypatch.delenv("BLOCKSCALE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/blockscale")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/blockscale")


# ---------------------------------------------------------------- rotary scaling, which transformers drops


def llama3_factors(dim: int, factor: float) -> np.ndarray:
    """As llama.cpp's converter computes them, wave by wave."""
    result = []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * 10000.0 ** (i / dim)
        if wavelength < 8192 / 4:
            result.append(1.0)
        elif wavelength > 8192 / 1:
            result.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            result.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(result, dtype=np.float32)


def test_llama_3s_rotary_factors_become_its_config(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    dim = HIDDEN // HEADS
    factors = llama3_factors(dim, 8.0)
    assert len(set(factors)) > 2
    write_gguf(tmp_path / "tiny.gguf", llama_tensors(), extra={"rope_freqs.weight": factors})
    model = AutoModelForCausalLM.from_pretrained(import_gguf(tmp_path / "tiny.gguf"))
    plain = 10000.0 ** -(torch.arange(0, dim, 2).double() / dim)
    expected = plain / torch.from_numpy(factors).double()
    torch.testing.assert_close(model.model.rotary_emb.inv_freq.double(), expected, rtol=1e-6, atol=0.0)


def test_other_rotary_factors_are_refused(tmp_path: Path) -> None:
    factors = llama3_factors(HIDDEN // HEADS, 8.0) ** 1.1
    write_gguf(tmp_path / "tiny.gguf", llama_tensors(), extra={"rope_freqs.weight": factors.astype(np.float32)})
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight are not those of Llama 3"):
        import_gguf(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("kind", [gguf.RopeScalingType.LINEAR, gguf.RopeScalingType.YARN])
def test_other_rotary_scaling_is_refused(kind: gguf.RopeScalingType, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", llama_tensors(), metadata=lambda w: w.add_rope_scaling_type(kind))
    with pytest.raises(CheckpointError, match=f"rotary scaling '{kind.value}' is not read"):
        import_gguf(tmp_path / "tiny.gguf")


# ---------------------------------------------------------------- other architectures


@pytest.mark.parametrize("matrix_type", [TYPES.F32, TYPES.Q8_0], ids=lambda t: t.name)
def test_an_architecture_that_goes_through_transformers(
    matrix_type: gguf.GGMLQuantizationType, tmp_path: Path, cache: Path
) -> None:
    pytest.importorskip("accelerate")
    weights = write_gguf(tmp_path / "tiny.gguf", phi3_tensors(), architecture="phi3", matrix_type=matrix_type)
    folder = import_gguf(tmp_path / "tiny.gguf")
    check_equal(folder, weights)
    opened = open_folder(folder)
    assert opened.config["architectures"] == ["Phi3ForCausalLM"]
    assert "quantization_config" not in opened.config
    assert (folder / "tokenizer.json").is_file()
    assert list(cache.iterdir()) == [folder]


def test_an_architecture_that_nobody_knows(tmp_path: Path, cache: Path) -> None:
    pytest.importorskip("accelerate")
    write_gguf(tmp_path / "tiny.gguf", llama_tensors(), architecture="strange")
    with pytest.raises(CheckpointError, match=r"transformers cannot read this GGUF: .*strange"):
        import_gguf(tmp_path / "tiny.gguf")
    assert list(cache.iterdir()) == []


def test_accelerate_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", phi3_tensors(), architecture="phi3")
    monkeypatch.setattr(gguf_import.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError) as caught:
        import_gguf(tmp_path / "tiny.gguf")
    assert caught.value.hint == "pip install accelerate"


# ---------------------------------------------------------------- files that are damaged or do not fit


def without(name: str) -> dict[str, Stored]:
    return {n: t for n, t in llama_tensors().items() if t.name != name}


def reshaped(name: str, *shape: int) -> dict[str, Stored]:
    return {n: Stored(t.name, shape) if t.name == name else t for n, t in llama_tensors().items()}


@pytest.mark.parametrize(
    ("stored", "options", "match"),
    [
        (
            llama_tensors(),
            {"extra": {"blk.0.ffn_gate_exps.weight": np.ones((2, 2), np.float32)}},
            "ffn_gate_exps.*place",
        ),
        (llama_tensors(), {"extra": {"blk.2.attn_norm.weight": np.ones(HIDDEN, np.float32)}}, "blk.2.*has no place"),
        (without("blk.1.ffn_up.weight"), {}, "1 tensors of the model are missing, first 'blk.1.ffn_up.weight'"),
        (without("token_embd.weight"), {}, "missing, first 'token_embd.weight'"),
        (
            reshaped("blk.0.attn_k.weight", 48, HIDDEN),
            {},
            r"'blk.0.attn_k.weight' is \[48, 64\], the model's \[32, 64\]",
        ),
        (llama_tensors(), {"has_tokenizer": False}, "transformers cannot read its tokenizer"),
    ],
)
def test_a_file_that_does_not_fit_its_model(
    stored: dict[str, Stored], options: dict[str, Any], match: str, tmp_path: Path, cache: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", stored, **options)
    with pytest.raises(CheckpointError, match=match) as caught:
        import_gguf(tmp_path / "tiny.gguf")
    assert str(tmp_path / "tiny.gguf") in str(caught.value)
    assert list(cache.iterdir()) == []


def test_an_element_type_without_a_decoder(tmp_path: Path) -> None:
    stored = without("blk.0.ffn_norm.weight")
    extra = {"blk.0.ffn_norm.weight": np.ones(HIDDEN, np.int32)}
    write_gguf(tmp_path / "tiny.gguf", stored, extra=extra)
    with pytest.raises(CheckpointError, match=r"'blk.0.ffn_norm.weight' is I32, which is not read"):
        import_gguf(tmp_path / "tiny.gguf")


def test_a_file_cut_short_anywhere(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", llama_tensors(), matrix_type=TYPES.Q8_0)
    whole = (tmp_path / "tiny.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 5000, 61), *range(5000, len(whole), 4999), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: not a readable GGUF file"):
            import_gguf(path)
    assert list(cache.iterdir()) == []


def test_a_file_of_something_else(tmp_path: Path) -> None:
    for content in (b"", b"GGUF", b"PK\x03\x04" + bytes(100), b"GGUF" + b"\xff" * 200, bytes(1000)):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"x\.gguf: not a readable GGUF file") as caught:
            import_gguf(tmp_path / "x.gguf")
        assert caught.value.hint


def test_a_file_without_an_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf.GGUFWriter, "add_architecture", lambda self: None)
    write_gguf(tmp_path / "tiny.gguf", llama_tensors())
    with pytest.raises(CheckpointError, match=r"not a readable GGUF file: 'general.architecture'"):
        import_gguf(tmp_path / "tiny.gguf")


# ---------------------------------------------------------------- the demo model


@pytest.mark.slow
def test_the_demo_model_is_what_transformers_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    try:
        path = demo_gguf()
    except CheckpointError as e:
        pytest.skip(str(e))
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = import_gguf(path)
    ours = load_file(folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
    theirs = model.state_dict()
    assert theirs.keys() - ours.keys() == {"lm_head.weight"}  # tied
    assert ours.keys() <= theirs.keys()
    assert all(same(ours[name], theirs[name]) for name in ours)
    config = AutoConfig.from_pretrained(folder)
    assert config.rope_parameters == model.config.rope_parameters
    assert config.tie_word_embeddings
    text = "Olá, mundo! def f(x): return x**2"
    tokenizers = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    first, second = (tokenizer(text)["input_ids"] for tokenizer in tokenizers)
    assert first == second
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
