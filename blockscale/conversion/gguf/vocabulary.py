"""A folder's tokenizer as llama.cpp's metadata.

The tokenizer is taken as transformers reads it, so that file and evaluation agree on it. Two kinds are written:
byte-level BPE (`gpt2`, which merges in the order of a list) and SentencePiece's BPE (`llama`, which merges the two
neighbours that form the token of highest score), whose scores follow from the order of the merges.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
from gguf import TokenType

from blockscale.checkpoint.shards import read_json
from blockscale.conversion.gguf.pretokenizers import pretokenizer_name
from blockscale.errors import CheckpointError
from blockscale.texts import special_tokens

_SPACE = "\u2581"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_NEVER_MERGED = -1e6  # a score below every merge's
_PREFIX_NOTICE = (
    "llama.cpp puts a space in front of what follows any special token; the model's tokenizer does so at the start of "
    "a text, or where none is"
)
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model"),
    *("tekken.json", "*.tiktoken", "tokenization_*.py"),
)
_SPECIALS = ("bos", "eos", "unk", "sep", "pad", "mask")
_PHI3 = re.compile("phi-?3", re.IGNORECASE)
_PHI3_TOKENS = {"</s>", "<unk>", "<s>", "<|endoftext|>"}


@dataclass(frozen=True)
class Vocabulary:
    """kind          llama.cpp's `tokenizer.ggml.model`: "gpt2" or "llama"
    tokens, types   one an embedding row
    merges          "left right", in order ("gpt2")
    scores          one a token ("llama")
    specials        "bos", "eos", ... and "eot" -> token
    """

    kind: str
    pre: str
    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str]
    scores: Sequence[float]
    specials: Mapping[str, int]
    has_bos: bool
    has_eos: bool
    has_space_prefix: bool | None
    takes_spaces_after_specials: bool
    chat_template: str | Mapping[str, str] | None
    notices: tuple[str, ...] = ()

    def model_name(self, name: str) -> str:
        """The name to write. llama.cpp takes spaces after special tokens away for models called Phi-3, and fails where
        such a model lacks Phi-3's tokens."""
        has_tokens = set(self.tokens) >= _PHI3_TOKENS
        if _PHI3.search(name):
            return name if has_tokens else _PHI3.sub("phi 3", name)
        return f"{name} (phi-3)" if has_tokens and self.takes_spaces_after_specials else name


def read_vocabulary(path: Path, config: Any, num_tokens: int) -> Vocabulary:
    """`num_tokens`: rows of the embedding. CheckpointError for a tokenizer that is missing, larger than that, or of a
    kind that llama.cpp does not have."""
    tokenizer = _load(path)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    model = backend["model"]
    if model["type"] != "BPE" or model.get("dropout") or model.get("continuing_subword_prefix"):
        raise CheckpointError(f"{path}: a tokenizer of type {model['type']} is not written as GGUF", hint="BPE is")
    added = {token["id"]: token for token in backend["added_tokens"]}
    vocabulary = {**model["vocab"], **{t["content"]: i for i, t in added.items()}}
    largest = max(vocabulary.values(), default=-1)
    if largest >= num_tokens:
        raise CheckpointError(
            f"{path}: the tokenizer gives token {largest}, the model knows {num_tokens}",
            hint="tokenizer and model do not belong together",
        )
    is_sentencepiece = bool(model.get("byte_fallback"))
    tokens = [f"[PAD{i}]" for i in range(num_tokens)]
    types = [int(TokenType.UNUSED)] * num_tokens
    for token, i in vocabulary.items():
        tokens[i], types[i] = _entry(token, added.get(i), model.get("unk_token"), is_sentencepiece=is_sentencepiece)
    if len(set(tokens)) < len(tokens):
        twice = Counter(tokens).most_common(1)[0][0]
        raise CheckpointError(f"{path}: the tokenizer has {twice!r} twice", hint="llama.cpp wants tokens that differ")
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    before, after = special_tokens(tokenizer.encode)
    specials = _specials(path, tokenizer, config, num_tokens)
    if before not in ([], [specials["bos"]]) or after not in ([], [specials["eos"]]):
        raise CheckpointError(
            f"{path}: the tokenizer puts {before} before and {after} after a text, llama.cpp one token at most",
            hint="mend post_processor in tokenizer.json",
        )
    return Vocabulary(
        kind="llama" if is_sentencepiece else "gpt2",
        pre="default" if is_sentencepiece else pretokenizer_name(backend),
        tokens=tokens,
        types=types,
        merges=[] if is_sentencepiece else [f"{left} {right}" for left, right in merges],
        scores=_scores(path, model["vocab"], merges, {t["content"] for t in added.values()}, num_tokens)
        if is_sentencepiece
        else [],
        specials=specials,
        has_bos=bool(before),
        has_eos=bool(after),
        has_space_prefix=_has_space_prefix(path, backend) if is_sentencepiece else None,
        takes_spaces_after_specials=any(token["special"] and token["rstrip"] for token in added.values()),
        chat_template=_chat_template(path, tokenizer.chat_template),
        notices=(_PREFIX_NOTICE,) if is_sentencepiece and _prefixes_once(backend) else (),
    )


def check_tokenizer(path: Path) -> None:
    """CheckpointError, at once, for a folder without any tokenizer's file."""
    if not any(file.is_file() for name in _TOKENIZER_FILES for file in path.glob(name)):
        raise CheckpointError(
            f"{path}: no tokenizer, and a GGUF file holds one",
            hint="copy tokenizer.json and tokenizer_config.json there from the model it was made from",
        )


def _load(path: Path) -> Any:
    check_tokenizer(path)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as e:  # transformers raises what its parsing trips over
        reason = " ".join(str(e).split()) or type(e).__name__
        raise CheckpointError(
            f"{path}: no tokenizer that transformers can read: {reason}",
            hint="copy tokenizer.json and tokenizer_config.json there (tokenizer.model alone needs sentencepiece)",
        ) from e
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise CheckpointError(f"{path}: {type(tokenizer).__name__} has no tokenizer.json", hint="copy it there")
    return tokenizer


def _entry(
    token: str, added: Mapping[str, Any] | None, unknown: str | None, *, is_sentencepiece: bool
) -> tuple[str, int]:
    """What the file calls a token, and its type."""
    if is_sentencepiece and token == unknown:
        return token, TokenType.UNKNOWN
    if added is None:
        return token, TokenType.BYTE if is_sentencepiece and _BYTE.fullmatch(token) else TokenType.NORMAL
    if added["special"]:
        return token, TokenType.CONTROL
    # llama.cpp looks for these before it writes spaces as the sign
    return (token.replace(_SPACE, " ") if added["normalized"] else token), TokenType.USER_DEFINED


def _scores(
    path: Path, vocabulary: Mapping[str, int], merges: Sequence[tuple[str, ...]], added: set[str], num_tokens: int
) -> list[float]:
    """Minus the rank of the first merge that makes a token.

    CheckpointError where merging by these scores is not merging in order: merges of one token that do not follow each
    other, or two neighbours that form a token and have no merge.
    """
    first: dict[str, int] = {}
    latest = -1
    for rank, (left, right) in enumerate(merges):
        piece = left + right
        made_first = first.setdefault(piece, rank)
        if made_first < latest and piece not in added:
            raise _no_scores(path, f"merge {rank}, {left!r} + {right!r}, comes after those of other tokens")
        latest = max(latest, made_first)
    in_order = set(merges)
    scores = [_NEVER_MERGED] * num_tokens
    for piece, i in vocabulary.items():
        if piece in first:
            scores[i] = -float(first[piece])
        if piece in added or _BYTE.fullmatch(piece):
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary and (left, right) not in in_order:
                raise _no_scores(path, f"{left!r} + {right!r} form a token and have no merge")
    return scores


def _no_scores(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: the tokenizer's merges are not SentencePiece's: {why}",
        hint="llama.cpp merges by scores, not in order",
    )


def _has_space_prefix(path: Path, backend: Mapping[str, Any]) -> bool:
    """Whether a space goes in front of a text. CheckpointError for what else is done to it."""
    has_prefix = False
    normalizer = backend.get("normalizer")
    parts = normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]
    for part in (p for p in parts if p):
        if part["type"] == "Prepend" and part.get("prepend") == _SPACE:
            has_prefix = True
        elif part["type"] != "Replace" or (part.get("pattern"), part.get("content")) != ({"String": " "}, _SPACE):
            raise CheckpointError(f"{path}: llama.cpp has no normalizer {part['type']}", hint="it takes text as it is")
    before = backend.get("pre_tokenizer")
    if before and before["type"] == "Metaspace" and not before.get("split", True):
        return has_prefix or before.get("prepend_scheme", "always") != "never"
    is_idle = (
        before and before["type"] == "Split" and before.get("pattern") == {"String": " "}
    )  # none is left to split by
    if before and not is_idle:
        raise CheckpointError(
            f"{path}: llama.cpp has no pre-tokenizer {before['type']} for SentencePiece", hint="it merges whole texts"
        )
    return has_prefix


def _prefixes_once(backend: Mapping[str, Any]) -> bool:
    before = backend.get("pre_tokenizer") or {}
    return before.get("type") == "Metaspace" and before.get("prepend_scheme", "always") != "never"


def _specials(path: Path, tokenizer: Any, config: Any, num_tokens: int) -> dict[str, int]:
    """By llama.cpp's names, from the tokenizer, else from the config; of several ends the others' first is `eot`."""
    ends = _ids(getattr(config, "eos_token_id", None))
    if (path / "generation_config.json").is_file():
        ends += _ids(read_json(path / "generation_config.json").get("eos_token_id"))
    found = {name: getattr(tokenizer, f"{name}_token_id", None) for name in _SPECIALS}
    specials = {name: token for name, token in found.items() if token is not None and token < num_tokens}
    ends = [token for token in ends if token < num_tokens]
    if "eos" not in specials and not ends:
        raise CheckpointError(
            f"{path}: no end-of-sequence token", hint="set eos_token in tokenizer_config.json; generation would not end"
        )
    eos = specials.setdefault("eos", ends[0] if ends else 0)
    others = [token for token in ends if token != eos]
    if others:
        specials["eot"] = others[0]
    bos = [token for token in _ids(getattr(config, "bos_token_id", None)) if token < num_tokens]
    # without one llama.cpp would take token 11
    specials.setdefault("bos", bos[0] if bos else eos)
    return specials


def _chat_template(path: Path, template: Any) -> str | Mapping[str, str] | None:
    texts = template.values() if isinstance(template, Mapping) else [template or ""]
    if not all(isinstance(text, str) for text in texts):
        raise CheckpointError(f"{path}: the chat template is no text", hint="mend tokenizer_config.json")
    return template or None


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]


def add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.kind)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)  # an empty list is not written
    writer.add_token_scores(vocabulary.scores)
    adders = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "unk": writer.add_unk_token_id,
        "sep": writer.add_sep_token_id,
        "pad": writer.add_pad_token_id,
        "mask": writer.add_mask_token_id,
        "eot": writer.add_eot_token_id,
    }
    for name, token in vocabulary.specials.items():
        adders[name](token)
    writer.add_add_bos_token(vocabulary.has_bos)
    writer.add_add_eos_token(vocabulary.has_eos)
    if vocabulary.has_space_prefix is not None:
        writer.add_add_space_prefix(vocabulary.has_space_prefix)
    template = vocabulary.chat_template
    if isinstance(template, Mapping):
        writer.add_chat_template([{"name": name, "template": text} for name, text in template.items()])
    elif template:
        writer.add_chat_template(template)
