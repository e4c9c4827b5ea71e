"""Damage, drawn from a seed: to bytes, and to JSON as values and as text."""

import json
import random
import struct
from collections.abc import Callable
from typing import Any

DEEP = 20_000
NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 0.5, "", "x", [], {}, [None], {"": None}, [[]]),
    *(2**31, 2**63 - 1, 2**63, 2**64, 2**70, -(2**63), 10**400),
    *(float("inf"), float("-inf"), float("nan"), 1e308),
    *("../../etc/passwd", "/etc/passwd", "a/../b", ".", "..", "~", "\0", "a\0b", "a\nb", "\x1b[2J\x1b]0;x\x07"),
    *("\ud800", "x" * 5000, "é" * 300, "re:([", "re:(a+)+$", "*", "**", "[", "model.layers.*", "%s%n", "{0}"),
    *("NVFP4", "FP8", "MIXED_PRECISION", "modelopt", "compressed-tensors", "fp8", "mxfp4", "awq", "gptq", "F8_E4M3"),
)  # fmt: skip


def damage_bytes(data: bytes, draw: random.Random) -> bytes:
    """One to four wounds."""
    for _ in range(draw.randint(1, 4)):
        data = draw.choice(_WOUNDS)(data, draw)
    return data


def _flip(data: bytes, draw: random.Random) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _remove(data: bytes, draw: random.Random) -> bytes:
    begin = draw.randrange(len(data) + 1)
    return data[:begin] + data[begin + draw.randint(1, 40) :]


def _repeat(data: bytes, draw: random.Random) -> bytes:
    begin = draw.randrange(len(data) + 1)
    end = begin + draw.randint(1, 200)
    return data[:end] + data[begin:end] + data[end:]


def _insert(data: bytes, draw: random.Random) -> bytes:
    begin = draw.randrange(len(data) + 1)
    return data[:begin] + draw.randbytes(draw.randint(1, 16)) + data[begin:]


def _number(data: bytes, draw: random.Random) -> bytes:
    """Eight bytes become a number that is hardly a length."""
    begin = draw.randrange(max(1, len(data) - 8))
    value = draw.choice((0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1))
    return data[:begin] + struct.pack("<Q", value) + data[begin + 8 :]


_WOUNDS: tuple[Callable[[bytes, random.Random], bytes], ...] = (_flip, _flip, _cut, _remove, _repeat, _insert, _number)


def damage_json(text: str, draw: random.Random) -> bytes:
    """A document of which some value is another's, missing or nasty; sometimes no JSON any more."""
    value = json.loads(text)
    for _ in range(draw.randint(1, 3)):
        _damage_value(value, draw)
    written = json.dumps(value, ensure_ascii=draw.random() < 0.5)
    return draw.choice(_SPELLINGS)(written, draw)


def _damage_value(value: Any, draw: random.Random) -> None:
    """Walks down from the root and changes one entry."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = draw.choice(keys)
        if isinstance(value[key], dict | list) and value[key] and draw.random() < 0.8:
            value = value[key]
            continue
        match draw.randrange(4):
            case 0:
                del value[key]
            case 1:
                value[key] = value[draw.choice(keys)]
            case 2 if isinstance(value, dict):
                value[str(draw.choice(NASTY))] = value.pop(key)
            case _:
                value[key] = draw.choice(NASTY)
        return


def _as_is(text: str, draw: random.Random) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _twice(text: str, draw: random.Random) -> bytes:
    """The first key again, with another value."""
    end = text.find(":")
    again = text[1:end] + ": " + json.dumps(draw.choice(NASTY)) + ", " if text[:1] == "{" and end > 0 else ""
    return ("{" + again + text[1:]).encode("utf-8", "surrogatepass")


def _deep(text: str, draw: random.Random) -> bytes:
    opening, closing = draw.choice((("[", "]"), ('{"a":', "}")))
    inner = (opening * DEEP + "0" + closing * DEEP) if draw.random() < 0.5 else opening * DEEP
    return text.replace("null", inner, 1).encode("utf-8", "surrogatepass")


def _wounded(text: str, draw: random.Random) -> bytes:
    return damage_bytes(text.encode("utf-8", "surrogatepass"), draw)


def _other_encoding(text: str, draw: random.Random) -> bytes:
    return text.encode(draw.choice(("utf-16", "utf-32", "latin-1", "utf-8-sig")), "replace")


_SPELLINGS = (_as_is, _as_is, _as_is, _as_is, _twice, _deep, _wounded, _other_encoding)
