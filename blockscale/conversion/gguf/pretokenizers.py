"""How a tokenizer cuts text before it merges, under llama.cpp's names.

llama.cpp has one compiled splitter a name, found here by the expressions in tokenizer.json. A tokenizer with others is
refused: under a wrong name the file would load, and split numbers or spaces otherwise than the model learnt.
Source: src/llama-vocab.cpp, which quotes the expressions.
"""

from collections.abc import Mapping
from typing import Any

from blockscale.errors import CheckpointError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_CASED = r"[^\r\n\p{L}\p{N}]?"
_SYMBOLS_AND_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_LLAMA3 = "|".join((_CONTRACTIONS, _WORD, r"\p{N}{1,3}", _SYMBOLS, _SPACES))
_QWEN2 = "|".join((_CONTRACTIONS, _WORD, r"\p{N}", _SYMBOLS, _SPACES))
_QWEN35 = "|".join(
    (
        _CONTRACTIONS,
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        _SPACES,
    )
)
_TEKKEN = "|".join(
    (
        f"{_BEFORE_CASED}{_UPPER}*{_LOWER}+",
        f"{_BEFORE_CASED}{_UPPER}+{_LOWER}*",
        r"\p{N}",
        _SYMBOLS_AND_SLASH,
        _SPACES,
    )
)
_GPT4O = "|".join(
    (
        f"{_BEFORE_CASED}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?",
        f"{_BEFORE_CASED}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?",
        r"\p{N}{1,3}",
        _SYMBOLS_AND_SLASH,
        _SPACES,
    )
)

# Steps in front of the byte alphabet, and whether a whole piece in the vocabulary is taken without merging.
_NAMES: Mapping[tuple[tuple[str, ...], bool], str] = {
    (("gpt2",), False): "gpt-2",
    (("digits", "gpt2"), False): "smollm",
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "dbrx",
    ((_QWEN2,), False): "qwen2",
    ((_QWEN35,), False): "qwen35",
    ((_TEKKEN,), True): "tekken",
    # o200k: every piece of its vocabulary is what its merges give, so taking it whole changes nothing
    ((_GPT4O,), False): "gpt-4o",
    ((_GPT4O,), True): "gpt-4o",
}
_NEWLINES = {"\\r": "\r", "\\n": "\n"}


def pretokenizer_name(backend: Mapping[str, Any]) -> str:
    """Of a byte-level BPE tokenizer, from tokenizer.json. CheckpointError for one that llama.cpp does not have."""
    normalizer = backend.get("normalizer")
    # llama.cpp's BPE takes text as it is; composed characters, all that NFC changes, are rare in it
    if normalizer is not None and normalizer.get("type") != "NFC":
        raise _unknown(f"normalizer {normalizer.get('type')}")
    steps = [step for part in _flat(backend.get("pre_tokenizer")) for step in _steps(part)]
    name = _NAMES.get((tuple(steps), bool(backend["model"].get("ignore_merges"))))
    if name is None:
        raise _unknown(f"pre-tokenizer {' + '.join(steps) or 'none'}")
    return name


def _flat(part: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [leaf for child in part["pretokenizers"] for leaf in _flat(child)]
    return [part]


def _steps(part: Mapping[str, Any]) -> list[str]:
    """The expressions that a part splits by, named where llama.cpp has no expression for them."""
    kind = part.get("type")
    if kind == "ByteLevel" and not part.get("add_prefix_space"):
        return ["gpt2"] if part.get("use_regex", True) else []
    if kind == "Digits" and part.get("individual_digits"):
        return ["digits"]
    expression = part.get("pattern", {}).get("Regex") if kind == "Split" else None
    if expression is not None and part.get("behavior") == "Isolated" and not part.get("invert"):
        return [_spelled(expression)]
    if expression is not None and part.get("behavior") == "Removed" and part.get("invert"):
        return [_spelled(expression)]  # keeps the matches, which cover everything
    raise _unknown(f"pre-tokenizer {dict(part)}")


def _spelled(expression: str) -> str:
    """With line ends as escapes, which is how most files spell them."""
    for escape, character in _NEWLINES.items():
        expression = expression.replace(character, escape)
    return expression


def _unknown(what: str) -> CheckpointError:
    return CheckpointError(
        f"tokenizer: {what} is none that is known from llama.cpp",
        hint="a guess would split texts otherwise than the model learnt; known: "
        + ", ".join(dict.fromkeys(_NAMES.values())),
    )
