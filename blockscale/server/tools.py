"""Calls of tools in a model's output, in the forms that chat templates teach.

    Hermes, Qwen   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, each call in its own pair
    Llama          {"name": ..., "parameters": {...}} and nothing else; several with ; between, <|python_tag|> before
    Mistral        [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...} for each

What does not parse, or names a tool that was not offered, stays text: nothing that the model wrote is lost.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from blockscale.engine.detokenizer import num_held
from blockscale.server.failure import ApiError

_BEGIN, _END = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_CALL = re.compile(r"\s*([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\]\w+)?\[ARGS\]")


@dataclass(frozen=True)
class Call:
    """`arguments` is JSON text."""

    name: str
    arguments: str


class Form(Enum):
    HERMES = "hermes"
    LLAMA = "llama"
    MISTRAL = "mistral"
    FORCED = "forced"  # the structure of the output leaves nothing but one call as JSON


# Form -> texts that are tokens of their own in such models, and must not be dropped as special
MARKERS = {Form.HERMES: (_BEGIN, _END), Form.LLAMA: (_PYTHON_TAG,), Form.MISTRAL: (_MISTRAL, "[ARGS]", "[CALL_ID]")}


def form_of(template: str) -> Form | None:
    """The form that a chat template teaches; None where it teaches none that is read here."""
    if "<function=" in template or "<arg_key>" in template:  # calls in XML
        return None
    if _BEGIN in template:
        return Form.HERMES
    if _MISTRAL in template:
        return Form.MISTRAL
    return Form.LLAMA if _PYTHON_TAG in template or '"parameters":' in template else None


class CallReader:
    """Text in; text and whole calls out, in order. What may still become a call is held back."""

    def __init__(self, form: Form, names: Sequence[str]) -> None:
        self._form = form
        self._names = frozenset(names)
        self._held = ""
        self._is_text = False  # of the forms that are calls from the first character on: this output is none

    def push(self, text: str) -> list[str | Call]:
        self._held += text
        match self._form:
            case Form.HERMES:
                return self._push_hermes()
            case Form.MISTRAL:
                return self._push_mistral()
        if not self._is_text:
            begun = self._held.lstrip()
            if not begun or begun.startswith(("{", _PYTHON_TAG)) or _PYTHON_TAG.startswith(begun):
                return []
            self._is_text = True
        return self._release(len(self._held))

    def finish(self) -> list[str | Call]:
        """What was held back, at the end of the output."""
        text, self._held = self._held, ""
        if self._form is Form.HERMES:
            # an output that was cut off, or whose end marker ended it
            found = calls_in(text.strip().removeprefix(_BEGIN), self._names) if text.lstrip().startswith(_BEGIN) else []
        elif self._form is Form.MISTRAL:
            found = _mistral_calls(text, self._names) if text.lstrip().startswith(_MISTRAL) else []
        else:
            found = [] if self._is_text else calls_in(text.strip().removeprefix(_PYTHON_TAG), self._names)
        return list(found) or ([text] if text else [])

    def _push_hermes(self) -> list[str | Call]:
        pieces: list[str | Call] = []
        while True:
            before, begun, rest = self._held.partition(_BEGIN)
            if not begun:
                return pieces + self._release_text(_BEGIN)
            inside, ended, after = rest.partition(_END)
            if not ended:
                pieces += [before.rstrip()] if before.strip() else []
                self._held = begun + inside
                return pieces
            calls = calls_in(inside, self._names)
            text = before.rstrip() if calls else before + begun + inside + ended
            pieces += ([text] if text else []) + list(calls)
            self._held = after

    def _push_mistral(self) -> list[str | Call]:
        at = self._held.find(_MISTRAL)
        return self._release_text(_MISTRAL) if at < 0 else self._release(at)

    def _release_text(self, marker: str) -> list[str | Call]:
        """All but the beginning of a marker and the white space before it, which goes if a call follows."""
        sure = self._held[: len(self._held) - num_held(self._held, [marker])]
        return self._release(len(sure.rstrip()))

    def _release(self, length: int) -> list[str | Call]:
        text, self._held = self._held[:length], self._held[length:]
        return [text] if text else []


def calls_in(text: str, names: frozenset[str]) -> tuple[Call, ...]:
    """The calls that a text of JSON consists of, one after another or in a list; none if it holds anything else."""
    calls: list[Call] = []
    decoder = json.JSONDecoder()
    at = _skip(text, 0)
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return ()
        for item in value if isinstance(value, list) else [value]:
            call = _call(item)
            if call is None or call.name not in names:
                return ()
            calls.append(call)
        at = _skip(text, at)
    return tuple(calls)


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n;,":
        at += 1
    return at


def _call(item: Any) -> Call | None:
    if isinstance(item, dict) and isinstance(item.get("function"), dict):
        item = item["function"]
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return None
    arguments = item.get("arguments", item.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    return Call(item["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _mistral_calls(text: str, names: frozenset[str]) -> tuple[Call, ...]:
    calls: list[Call] = []
    for part in text.strip().split(_MISTRAL)[1:]:
        named = _MISTRAL_CALL.match(part)
        found = calls_in(part if named is None else named_call(named[1], part[named.end() :]), names)
        if not found:
            return ()
        calls += found
    return tuple(calls)


def named_call(name: str, arguments: str) -> str:
    """The JSON text of a call whose name stands apart from its arguments."""
    return f'{{"name": {json.dumps(name)}, "arguments": {arguments.strip() or "{}"}}}'


def call_schema(functions: Sequence[Mapping[str, Any]]) -> str:
    """JSON schema (as text) of one call of one of these functions ({"name", "parameters"})."""
    definitions: dict[str, Any] = {}
    branches = []
    for function in functions:
        parameters = dict(function.get("parameters") or {"type": "object"})
        for key in ("$defs", "definitions"):  # references start at the root of the whole schema
            for name, schema in parameters.pop(key, {}).items():
                if definitions.setdefault(key, {}).setdefault(name, schema) != schema:
                    message = f"two tools define '{name}' under {key}, and differently"
                    raise ApiError(message, param="tools", code="invalid_value", hint="rename one of them")
        properties = {"name": {"const": function["name"]}, "arguments": parameters}
        shape = {"type": "object", "properties": properties, "required": ["name", "arguments"]}
        branches.append({**shape, "additionalProperties": False})
    schema = branches[0] if len(branches) == 1 else {"anyOf": branches}
    return json.dumps({**schema, **definitions})
