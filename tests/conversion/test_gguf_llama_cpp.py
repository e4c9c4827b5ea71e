"""Files in llama.cpp itself, where llama-cpp-python is installed: logits, and how it cuts text into tokens.

llama.cpp rounds the inputs of packed products to 8 bits, and those of BF16 products to BF16. The same rounding is done
here in the hosted model; llama.cpp may be as far from the exact logits as that, and a little more for its fp16 cache.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from blockscale.checkpoint.reader import open_checkpoint
from blockscale.conversion.gguf.write import write_gguf
from blockscale.host.linear import KeptLinear, PackedLinear
from blockscale.host.model import load_model
from tests.conversion.gguf_models import (
    LLAMA3_SPLIT,
    MODELS,
    NUM_TOKENS,
    QWEN2_SPLIT,
    add_byte_level_tokenizer,
    add_sentencepiece_tokenizer,
    byte_level,
    split_by,
)
from tests.conversion.gguf_reading import MakeModel, Quantized

llama_cpp = pytest.importorskip("llama_cpp")

NUM_IDS = 100
SLACK = 2.0  # times the emulated rounding's own error


def round_q8_0(x: Tensor) -> Tensor:
    """[..., K] in blocks of 32: 8-bit integers, and a scale rounded to fp16 after the division by it."""
    blocks = x.unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale > 0, blocks / scale, 0.0).round()
    return (codes * scale.half().float()).flatten(-2)


def round_input(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    is_packed = isinstance(module, PackedLinear) and module.linear.weight.format.name in ("nvfp4", "mxfp4")
    return (round_q8_0(args[0]) if is_packed else args[0].bfloat16().float(), *args[1:])


def logits_of(path: Path, ids: list[int]) -> Tensor:
    model = llama_cpp.Llama(str(path), n_ctx=512, n_threads=1, logits_all=True, verbose=False)
    model.eval(ids)
    result = torch.from_numpy(np.array(model.scores[: len(ids)]))
    model.close()
    return result


@pytest.mark.parametrize("recipe", ["source", "nvfp4-w4a16", "mxfp4"])
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_model(
    name: str, recipe: str, gguf_model: MakeModel, gguf_quantized: Quantized, tmp_path: Path
) -> None:
    folder = gguf_model(name) if recipe == "source" else gguf_quantized(name, recipe)
    write_gguf(open_checkpoint(folder), tmp_path / "x.gguf")
    ids = torch.randint(0, NUM_TOKENS, (NUM_IDS,), generator=torch.Generator().manual_seed(1))
    hosted = load_model(folder, emulate_activations=False)
    exact = hosted.logits(ids[None])[0]
    for module in hosted.model.modules():
        if isinstance(module, PackedLinear | KeptLinear):
            module.register_forward_pre_hook(round_input)
    rounded = hosted.logits(ids[None])[0]
    theirs = logits_of(tmp_path / "x.gguf", ids.tolist())

    def error(logits: Tensor) -> float:
        """Of the median token: a router close to a tie may send a token elsewhere."""
        return ((logits - exact).norm(dim=-1) / exact.norm(dim=-1)).median().item()

    assert 0 < error(theirs) < SLACK * error(rounded)


TEXTS = [
    "Hello the world, in the 12345 and 1234567.",
    " the  the\n\n123\tin  ",
    "I'll we'VE it's\r\n\r\n x",
    "\u00dcn\u00efc\u00f6d\u00e9 \u4f60\u597d 12\uff13 \U0001f600 e\u0301",
    "a<tool>b <tool> the in<tool>",
]


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "llama-bpe", "qwen2", "sentencepiece", "sentencepiece-bare"])
def test_llama_cpp_finds_the_same_tokens(kind: str, gguf_model: MakeModel, tmp_path: Path) -> None:
    import shutil

    from transformers import AutoTokenizer

    folder = shutil.copytree(gguf_model("llama"), tmp_path / "model")
    digits = {"type": "Digits", "individual_digits": True}
    if kind.startswith("sentencepiece"):
        add_sentencepiece_tokenizer(folder, has_prefix=kind == "sentencepiece")
    elif kind == "gpt-2":
        add_byte_level_tokenizer(folder)
    elif kind == "smollm":
        steps = {"type": "Sequence", "pretokenizers": [digits, byte_level(use_regex=True)]}
        add_byte_level_tokenizer(folder, steps)
    elif kind == "llama-bpe":
        add_byte_level_tokenizer(folder, split_by(LLAMA3_SPLIT), ignore_merges=True, has_bos=True)
    else:
        add_byte_level_tokenizer(folder, split_by(QWEN2_SPLIT))
    write_gguf(open_checkpoint(folder), tmp_path / "x.gguf")
    theirs = llama_cpp.Llama(str(tmp_path / "x.gguf"), vocab_only=True, verbose=False)
    own = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert theirs.tokenize(text.encode(), add_bos=True, special=True) == own.encode(text), text
