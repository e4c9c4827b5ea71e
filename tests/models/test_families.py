"""Every family against transformers, whole prompts, pieces, token by token, and sequences side by side."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from blockscale.errors import ModelError
from blockscale.models.load import load_decoder

from .running import NUM_TOKENS, PIECES, batch_of, poisoned, relative, run, tokens, transformers_logits

FAMILIES = (
    "llama",
    "llama3",
    "smollm2",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma2",
    "gemma3_text",
    "gemma3",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
)
# fp32 sums in another order: the models are two layers of a few products of 64 to 96 terms
FP32 = 2e-5
# a key or value between two bfloat16 may fall to either side: a step of 2^-8 of it, in few of them
ROUNDED = 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tiny_model: Callable[[str], Path]) -> None:
    path, ids = tiny_model(family), tokens()
    decoder = load_decoder(path)
    expected = transformers_logits(path, ids)
    whole, *others = (run(decoder, ids, pieces) for pieces in PIECES)
    assert whole.dtype == torch.float32
    assert relative(whole, expected) < ROUNDED
    for found in others:
        assert relative(found, whole) < ROUNDED
    assert relative(whole, whole.roll(1, 0)) > 0.1, "every row is alike: nothing was compared"


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_sequences_side_by_side(family: str, tiny_model: Callable[[str], Path]) -> None:
    """A step that mixes prompts, pieces and single tokens gives each sequence what it gets alone."""
    decoder = load_decoder(tiny_model(family))
    prompts = [tokens(seed=seed, count=count) for seed, count in ((1, 24), (2, 5), (3, 17))]
    alone = [run(decoder, ids, [len(ids)]) for ids in prompts]
    caches, table = poisoned(decoder, 8), torch.tensor([[6, 2], [4, 0], [1, 7]], dtype=torch.int32)
    first = (20, 4, 1)
    decoder.forward(batch_of([ids[:n] for ids, n in zip(prompts, first, strict=True)], (0, 0, 0), table), caches)
    batch = batch_of([ids[n:] for ids, n in zip(prompts, first, strict=True)], first, table)
    assert not batch.is_decode
    found = decoder.logits(decoder.forward(batch, caches)).split([4, 1, 16])
    for own, ids, n, expected in zip(found, prompts, first, alone, strict=True):
        assert relative(own, expected[n : len(ids)]) < ROUNDED


def test_a_row_does_not_depend_on_the_batch(tiny_model: Callable[[str], Path]) -> None:
    """Bit for bit, in 4 and in 16 bits: what makes a batched engine's greedy output that of one by one."""
    decoder = load_decoder(tiny_model("qwen3"))
    prompts = [tokens(seed=seed, count=9) for seed in range(5)]
    table = torch.arange(10, dtype=torch.int32).view(5, 2)

    def steps(rows: list[int]) -> torch.Tensor:
        caches = decoder.allocate(10, 16)
        out = []
        for i in range(9):
            batch = batch_of([prompts[r][i : i + 1] for r in rows], [i] * len(rows), table[rows])
            out.append(decoder.logits(decoder.forward(batch, caches)))
        return torch.stack(out, 1)

    together = steps([0, 1, 2, 3, 4])
    for r in range(5):
        assert torch.equal(steps([r])[0], together[r])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype, tiny_model: Callable[[str], Path]) -> None:
    path, ids = tiny_model("gemma3_text"), tokens()
    expected = transformers_logits(path, ids)
    decoder = load_decoder(path, dtype=dtype)
    place = torch.finfo(dtype).eps
    for pieces in PIECES:
        # about a dozen roundings a layer, half a place each; they add up as the root of their number
        assert relative(run(decoder, ids, pieces), expected) < 8 * place


DIFFERENT: dict[str, tuple[str, Mapping[str, Any]]] = {
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "yarn": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0 + 0.1 * i for i in range(6)],
                "long_factor": [2.0 + i for i in range(6)],
                "original_max_position_embeddings": 512,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "old names": ("llama", {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    "softcaps": ("gemma2", {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.7}),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_configs_may_ask_for(what: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    family, change = DIFFERENT[what]
    path = shutil.copytree(tiny_model(family), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    if "rope_theta" in change:
        del config["rope_parameters"]
    (path / "config.json").write_text(json.dumps({**config, **change}))
    ids = tokens()
    expected = transformers_logits(path, ids)
    found = run(load_decoder(path), ids)
    assert relative(found, expected) < ROUNDED
    assert relative(found, run(load_decoder(tiny_model(family)), ids)) > 2 * ROUNDED or what == "dynamic rope"


def test_longrope_serves_the_context_that_is_asked_for(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    path = shutil.copytree(tiny_model("phi3"), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    rope = dict(DIFFERENT["longrope"][1]["rope_parameters"], original_max_position_embeddings=16)
    (path / "config.json").write_text(
        json.dumps({**config, "original_max_position_embeddings": 16, "rope_parameters": rope})
    )
    short, long = load_decoder(path), load_decoder(path, is_long=True)
    assert (short.context, long.context) == (16, 1024)
    ids = tokens()
    expected = transformers_logits(path, ids)  # more tokens than the original context
    assert relative(run(long, ids), expected) < ROUNDED
    assert relative(run(short, ids), expected) > 2 * ROUNDED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt_neox"}, "no decoder here for model type 'gpt_neox'"),
        ({"hidden_act": "relu"}, "no activation 'relu'"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "no rotary positions of type 'spiral'"),
        ({"num_key_value_heads": 3}, "4 heads over 3"),
        ({"head_dim": 24}, "heads of 24"),
        ({"hidden_size": None}, "hidden_size|cannot be read"),
        ({"num_hidden_layers": 3}, r"model\.layers\.2\.\S+: the checkpoint has no"),
        ({"num_hidden_layers": 1, "layer_types": ["chunked_attention"]}, "cannot be read: layer_types"),
        ({"vocab_size": 64}, r"the checkpoint has \[128, 64\], the model \[64, 64\]"),
        ({"model_type": "qwen3"}, "q_norm"),
        ({"attention_bias": True}, r"q_proj\.bias: the checkpoint has no"),
    ],
)
def test_what_is_refused(
    change: dict[str, Any], message: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    path = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError, match=message) as caught:
        load_decoder(path)
    assert caught.value.hint


def test_weights_that_nobody_has_a_place_for_are_refused(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    path = shutil.copytree(tiny_model("qwen3"), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(ModelError, match=r"(q|k)_norm\.weight: the decoder of this model type has no place"):
        load_decoder(path)


def test_num_tokens_is_past_every_window(tiny_model: Callable[[str], Path]) -> None:
    windows = {
        w for name in ("mistral", "gemma3_text", "gpt_oss") for w in load_decoder(tiny_model(name)).config.windows
    }
    assert windows == {0, 8}
    assert NUM_TOKENS > 2 * 8
