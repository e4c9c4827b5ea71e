"""The bytes of every token: what text, stop strings, log-probabilities and grammars are made of."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from blockscale.errors import ModelError

# Of a decoder's parts, those that change no byte of a token between two others. `Strip` takes the space off the front
# of a whole text; an output goes on from a prompt, where that space belongs.
_NEUTRAL = ("Fuse", "Strip")


@dataclass(frozen=True)
class Vocabulary:
    """Token ids to bytes.

    pieces      bytes of each id; empty for ids that the tokenizer does not know
    special     ids of tokens that steer and are not text (ends, turns, padding)
    separator   stands between two tokens: a space where spaces are no tokens, nothing anywhere else
    """

    pieces: tuple[bytes, ...]
    special: frozenset[int]
    separator: bytes = b""

    def piece(self, token: int) -> bytes:
        """Empty past the end: models may have more logits than tokens."""
        return self.pieces[token] if token < len(self.pieces) else b""


def read_vocabulary(tokenizer: Any) -> Vocabulary:
    """The vocabulary of a tokenizer of transformers that stands on the `tokenizers` library.

    Byte-level BPE (a character stands for each byte), SentencePiece with and without byte fallback ("▁" is a space,
    "<0x0A>" a byte), and tokenizers without a decoder. Raises ModelError for any other.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            f"{type(tokenizer).__name__}: its tokens' bytes cannot be read",
            hint="the model needs a tokenizer.json, which transformers writes for most tokenizers",
        )
    added = backend.get_added_tokens_decoder()
    names: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    pieces = [b""] * (1 + max([*names.values(), *added], default=-1))
    parts = _parts(backend)
    for name, token in names.items():
        pieces[token] = name.encode() if token in added else _piece(name, parts)
    for token, entry in added.items():
        pieces[token] = entry.content.encode()
    special = {token for token, entry in added.items() if entry.special} | set(tokenizer.all_special_ids)
    has_spaces = bool(parts) or any(" " in name for name, token in names.items() if token not in special)
    return Vocabulary(tuple(pieces), frozenset(special), b"" if has_spaces else b" ")


def _parts(backend: Any) -> Sequence[Mapping[str, Any]]:
    """The steps of the tokenizer's decoder; none without one."""
    if backend.decoder is None:
        return ()
    decoder = json.loads(backend.decoder.__getstate__())
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    known = {"ByteLevel", "ByteFallback", "Replace", "Metaspace", *_NEUTRAL}
    unknown = {part["type"] for part in parts} - known
    if unknown or any(p["type"] == "Replace" and "String" not in p["pattern"] for p in parts):
        raise ModelError(
            f"the tokenizer's decoder {' + '.join(part['type'] for part in parts)} is not one that is read here",
            hint=f"known: {', '.join(sorted(known))}",
        )
    return [part for part in parts if part["type"] not in _NEUTRAL]


def _piece(name: str, parts: Iterable[Mapping[str, Any]]) -> bytes:
    for part in parts:
        match part["type"]:
            case "ByteLevel":
                return _from_characters(name)
            case "Replace":
                name = name.replace(part["pattern"]["String"], part["content"])
            case "Metaspace":
                name = name.replace(part["replacement"], " ")
            case "ByteFallback" if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
                return bytes.fromhex(name[3:5])
    return name.encode()


def _from_characters(name: str) -> bytes:
    """A name with a character that stands for no byte is text as it is."""
    table = _bytes_of_characters()
    return bytes(table[c] for c in name) if all(c in table for c in name) else name.encode()


@cache
def _bytes_of_characters() -> Mapping[str, int]:
    """GPT-2's rule: a byte that prints in Latin-1 stands for itself, the others are numbered from U+0100 on."""
    printing = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
