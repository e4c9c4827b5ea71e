"""Loading: its memory, other shapes of checkpoints, and a real model."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.fresh import run_fresh
from tiny_configs import tiny_config

from blockscale import api
from blockscale.errors import CheckpointError, UsageError
from blockscale.host.model import load_model, load_tokenizer
from blockscale.kernels.paged_cache import KVFormat
from blockscale.models.caches import page_bytes
from blockscale.models.layers import PackedProduct
from blockscale.models.load import load_decoder
from blockscale.quantization.recipe import Recipe, Rule

from .running import PAGE, PIECES, batch_of, relative, run, tokens

_CODE = """
from pathlib import Path
import torch
torch.set_num_threads(1)
from blockscale.models.load import load_decoder
load_decoder(Path({tiny!r}))  # what a process comes to know once: modules, the built kernels
status = Path("/proc/self/status").read_text()
result = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) * 1024 / 1e6
decoder = load_decoder(Path({path!r}))
"""
_ALLOCATOR_MB = 8  # pieces that lie between what is kept


def test_memory_while_loading(golden_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """At no time 1.15 times the checkpoint: in 16 bits, and in four."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=6,
        vocab_size=4096,
        num_attention_heads=16,
        num_key_value_heads=4,
    )
    source, packed = tmp_path / "source", tmp_path / "packed"
    transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(source)
    api.quantize(source, packed, "nvfp4-w4a16")
    for path in (source, packed):
        size_mb = sum(f.stat().st_size for f in path.glob("*.safetensors")) / 1e6
        done = run_fresh(_CODE.format(tiny=str(golden_checkpoint("modelopt_llama_nvfp4")), path=str(path)))
        taken = done.peak_mb - done.result
        assert taken < 1.15 * size_mb + _ALLOCATOR_MB, f"{taken:.0f} MB for {size_mb:.0f} MB"
        assert taken > 0.9 * size_mb, "the model was not loaded"


def test_a_page_takes_what_it_says(tiny_model: Callable[[str], Path]) -> None:
    for fmt in KVFormat:
        decoder = load_decoder(tiny_model("gemma3_text"), kv_format=fmt)
        held = sum(3 * PAGE * cache.bytes_per_token for cache in decoder.allocate(3, PAGE))
        assert 3 * decoder.page_bytes(PAGE) == held


def test_names_of_a_cache(tiny_model: Callable[[str], Path]) -> None:
    """Whatever changes keys and values changes the identity."""
    ways: tuple[Mapping[str, Any], ...] = (
        {},
        {"kv_format": KVFormat.FP8},
        {"dtype": torch.bfloat16},
        {"emulate_activations": True},
    )
    names = {load_decoder(tiny_model("llama"), **way).identity for way in ways}
    assert len(names) == len(ways)
    assert load_decoder(tiny_model("qwen3")).identity not in names


def test_deepseek(tmp_path: Path) -> None:
    """Latent attention, experts and a dense layer as one model."""
    import transformers

    sizes = tiny_config("deepseek_v3").to_dict() | {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "head_dim": 32}
    config = type(tiny_config("deepseek_v3"))(**sizes)
    torch.manual_seed(2)
    model = transformers.DeepseekV3ForCausalLM._from_config(config, dtype=torch.float16)
    with torch.no_grad():
        for tensor in model.parameters():
            drawn = torch.randn(tensor.shape)
            tensor.copy_(drawn * 0.12 if tensor.dim() > 1 else 1 + drawn * 0.1)
    path = tmp_path / "deepseek"
    model.save_pretrained(path)
    ids = tokens()
    expected = load_model(path).logits(ids.unsqueeze(0))[0]
    decoder = load_decoder(path, dtype=torch.float16)
    table = torch.tensor([[3, 1]], dtype=torch.int32)
    for pieces in PIECES:
        caches, out, begin = decoder.allocate(4, PAGE), [], 0
        for count in pieces:
            hidden = decoder.forward(batch_of([ids[begin : begin + count]], [begin], table), caches)
            out.append(decoder.logits(hidden))
            begin += count
        # some twenty roundings to fp16 on the way, and routers that see rounded inputs
        assert relative(torch.cat(out), expected) < 20 * 2.0**-11
    with pytest.raises(UsageError, match=r"cannot compute in torch\.float32"):
        load_decoder(path, dtype=torch.float32)
    assert page_bytes(decoder.config, PAGE, KVFormat.FP8) == decoder.config.num_layers * PAGE * 96


def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError):
        load_decoder(tmp_path)


def test_a_quantized_head(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """It stands beside the model's body, and is no linear of a layer."""
    path = tmp_path / "q"
    api.quantize(tiny_model("llama"), path, Recipe("head", "nvfp4", rules=(Rule("lm_head", "nvfp4"),)))
    decoder = load_decoder(path)
    assert isinstance(decoder.head, PackedProduct)
    found = run(decoder, tokens())
    assert relative(found, load_model(path).logits(tokens().unsqueeze(0))[0]) < 0.01


@pytest.mark.slow
def test_smollm2(tmp_path: Path) -> None:
    """A real model: next tokens and logits near those of transformers, in 16 bits and in NVFP4."""
    from blockscale.checkpoint.locate import locate

    source, packed = locate("demo"), tmp_path / "packed"
    api.quantize(source, packed, "nvfp4-w4a16")
    text = "The capital of France is Paris. The capital of Portugal is Lisbon. The capital of Italy is"
    for path in (source, packed):
        tokenizer = load_tokenizer(path)
        ids = torch.tensor(tokenizer.encode(text))
        assert len(ids) <= 2 * PAGE
        expected = load_model(path, emulate_activations=False).logits(ids.unsqueeze(0))[0]
        decoder = load_decoder(path)
        for pieces in ([len(ids)], [1] * len(ids)):
            found = run(decoder, ids, pieces)
            # keys and values are bfloat16 in the one and fp32 in the other
            assert relative(found, expected) < 0.02
            assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9
        assert tokenizer.decode([int(found[-1].argmax())]).strip() == "Rome"
