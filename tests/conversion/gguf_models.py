"""Tiny random models of every architecture that is written as GGUF, with tokenizers of both kinds."""

import json
from pathlib import Path
from typing import Any

import torch

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD_DIM, EXPERTS = 128, 192, 4, 2, 32, 4
GPT2_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that the byte alphabet writes as themselves
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
BOS, EOS, TOOL = "<|begin|>", "<|end|>", "<tool>"
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def byte_alphabet() -> list[str]:
    """The character that stands for each byte, by byte."""
    spare = iter(range(256, 512))
    return [chr(b) if b in GPT2_BYTES else chr(next(spare)) for b in range(256)]


def byte_level_vocabulary(num_bytes: int = 256) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Bytes, and a few merges of letters, digits and spaces."""
    vocabulary = {character: i for i, character in enumerate(byte_alphabet()[:num_bytes])}
    space = byte_alphabet()[32]
    merges = [("t", "h"), ("th", "e"), (space, "the"), ("1", "2"), ("12", "3"), ("i", "n"), (space, "in"), ("a", "n")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    return vocabulary, merges


def add_byte_level_tokenizer(
    folder: Path,
    pre_tokenizer: dict[str, Any] | None = None,
    *,
    ignore_merges: bool = False,
    has_bos: bool = False,
    num_bytes: int = 256,
) -> Path:
    """GPT-2's unless another `pre_tokenizer` is given."""
    vocabulary, merges = byte_level_vocabulary(num_bytes)
    specials = {BOS: True, EOS: True, TOOL: False}
    added = [_added(len(vocabulary) + n, text, special=special) for n, (text, special) in enumerate(specials.items())]
    backend = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer or byte_level(use_regex=True),
        "post_processor": _post_processor(added[0]) if has_bos else byte_level(use_regex=True),
        "decoder": byte_level(use_regex=True),
        "model": _bpe(vocabulary, merges, ignore_merges=ignore_merges),
    }
    return _write_tokenizer(folder, backend, "PreTrainedTokenizerFast")


def byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def split_by(expression: str) -> dict[str, Any]:
    """As tokenizer.json of Llama 3 and Qwen has it."""
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, byte_level(use_regex=False)]}


def sentencepiece_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Specials, bytes, characters and pieces, with every merge of each piece in the order of the pieces."""
    pieces = ["th", "the", "\u2581the", "in", "\u2581in", "an", "\u2581an", "and", "\u2581and", "he", "12"]
    names = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "\u2581",
        *map(chr, range(33, 127)),
        *pieces,
    ]
    vocabulary = {name: i for i, name in enumerate(names)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    return vocabulary, merges


def add_sentencepiece_tokenizer(
    folder: Path, merges: list[tuple[str, str]] | None = None, *, has_prefix: bool = True
) -> Path:
    """Llama 2's kind."""
    vocabulary, own_merges = sentencepiece_vocabulary()
    specials = [(0, "<unk>"), (1, "<s>"), (2, "</s>")]
    added = [*(_added(i, text, special=True) for i, text in specials), _added(len(vocabulary), TOOL, special=False)]
    parts = [{"type": "Prepend", "prepend": "\u2581"}] if has_prefix else []
    parts.append({"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"})  # type: ignore[dict-item]
    backend = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": parts},
        "pre_tokenizer": None,
        "post_processor": _post_processor(added[1]),
        "decoder": None,
        "model": {
            **_bpe(vocabulary, own_merges if merges is None else merges),
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }
    return _write_tokenizer(folder, backend, "PreTrainedTokenizerFast", bos="<s>", eos="</s>", unk_token="<unk>")


def _added(i: int, text: str, *, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": i, "content": text, "special": special, **flags}


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], *, ignore_merges: bool = False) -> dict[str, Any]:
    return {"type": "BPE", "vocab": vocabulary, "merges": [list(m) for m in merges], "ignore_merges": ignore_merges}


def _post_processor(bos: dict[str, Any]) -> dict[str, Any]:
    special = {"SpecialToken": {"id": bos["content"], "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    known = {bos["content"]: {"id": bos["content"], "ids": [bos["id"]], "tokens": [bos["content"]]}}
    return {"type": "TemplateProcessing", "single": [special, text], "pair": [special, text], "special_tokens": known}


def _write_tokenizer(
    folder: Path, backend: dict[str, Any], kind: str, bos: str = BOS, eos: str = EOS, **more: str
) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    settings = {"tokenizer_class": kind, "bos_token": bos, "eos_token": eos, "chat_template": TEMPLATE, **more}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


NUM_TOKENS = 400  # more than either tokenizer has

_SIZES = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": HIDDEN,
    "intermediate_size": FEED_FORWARD,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GEMMA = {
    "head_dim": HEAD_DIM,
    "query_pre_attn_scalar": HEAD_DIM,
    "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention"],
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "long_factor": [1.0 + 0.5 * i for i in range(HEAD_DIM // 2)],
    "short_factor": [1.0 + 0.1 * i for i in range(HEAD_DIM // 2)],
}
_GPT_OSS = {
    "head_dim": HEAD_DIM,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}

# name -> model type and what its config has beside the sizes
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": _LLAMA3_ROPE}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "mistral": ("mistral", {"head_dim": 64, "sliding_window": None}),
    "mixtral": ("mixtral", {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": _YARN_ROPE}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "head_dim": HEAD_DIM,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": ("gemma2", _GEMMA),
    "gemma3": (
        "gemma3_text",
        {
            **_GEMMA,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 8.0},
            },
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-partial": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "phi3-longrope": ("phi3", {"rope_parameters": _LONG_ROPE, "original_max_position_embeddings": 64}),
    "gpt_oss": ("gpt_oss", _GPT_OSS),
    "gpt_oss-yarn": ("gpt_oss", {**_GPT_OSS, "rope_parameters": {**_YARN_ROPE, "truncate": True}}),
}


def make_model(name: str, folder: Path) -> Path:
    """A bf16 model whose every parameter is drawn, norms and biases too, with a byte-level tokenizer."""
    import transformers

    family, own = MODELS[name]
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    config = kind(**{**_SIZES, **own})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * 0.15 if parameter.dim() > 1 else parameter + drawn * 0.2)
    model.save_pretrained(folder)
    return add_byte_level_tokenizer(folder)
