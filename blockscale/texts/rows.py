"""Rows of JSON lines and of data sets as one text.

A row has `messages` ([{"role", "content"}]), `conversations` ([{"from", "value"}]), `text` or `content`; the first of
these that it has is taken. Conversations go through the model's chat template. Plain rows are set apart by an empty
line, conversations by what the template puts around them.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from blockscale.errors import UsageError
from blockscale.texts.text import Text

Render = Callable[[Sequence[Mapping[str, str]]], str]  # UsageError for a conversation that the template refuses

FIELDS = ("messages", "conversations", "text", "content")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
_HINT = 'each line is {"text": ...}, {"messages": [{"role": ..., "content": ...}]} or {"conversations": [...]}'
_NO_TEMPLATE_HINT = "give plain text, or the chat template (chat_template.jinja) of the model it was tuned from"


class _Unusable(Exception):
    """A row without text, and why; it is left out and counted."""


def json_rows(name: str, content: str) -> Iterator[tuple[str, object]]:
    """(where, value) of each line that is not blank. UsageError that names a line that is not JSON."""
    for number, line in enumerate(content.split("\n"), 1):  # splitlines would cut at characters inside strings too
        if not line.strip():
            continue
        where = f"text {name}, line {number}"
        try:
            yield where, json.loads(line)
        except (ValueError, RecursionError) as e:
            raise UsageError(f"{where}: not JSON: {e}", hint="a .jsonl file holds one JSON object a line") from e


def join_rows(
    name: str,
    rows: Iterable[tuple[str, object]],
    render: Render | None,
    column: str | None = None,
    max_characters: int | None = None,
) -> Text:
    """One text of all rows, or of the first that have `max_characters` together.

    render   the model's chat template; None if it has none
    column   where rows have their text or conversation; by default one of FIELDS

    Rows without text, and those that the template refuses, are left out with a notice. UsageError for a row that is no
    object or holds something else where text should be, and where no row is left.
    """
    pieces: list[str] = []
    num_characters, problems, num_rows = 0, [], 0
    for where, row in rows:
        num_rows += 1
        try:
            pieces.append(_row_text(where, row, render, column))
        except _Unusable as e:
            problems.append(f"{where.removeprefix(f'text {name}, ')}: {e}")
            continue
        num_characters += len(pieces[-1])
        if max_characters is not None and num_characters >= max_characters:
            break
    if not pieces:
        raise UsageError(
            f"text {name} has no usable row" + (f"; the first, {problems[0]}" if problems else ""), hint=_HINT
        )
    notices: tuple[str, ...] = ()
    if problems:
        notices = (f"text {name}: {len(problems)} of {num_rows} rows are left out; the first, {problems[0]}",)
    return Text(name, "".join(pieces), notices)


def _row_text(where: str, row: object, render: Render | None, column: str | None) -> str:
    if not isinstance(row, Mapping):
        raise UsageError(f"{where}: {_kind(row)}, not an object", hint=_HINT)
    if column is not None and column not in row:
        columns = ", ".join(map(str, row)) or "none"
        raise UsageError(f"{where}: there is no column '{column}'", hint=f"columns: {columns}")
    field = column or next((name for name in FIELDS if row.get(name) is not None), None)
    if field is None:
        raise _Unusable(f"it has none of {', '.join(FIELDS)}")
    value = row[field]
    if isinstance(value, list):
        return _encodable(where, _conversation(f"{where}, {field}", value, render))
    if not isinstance(value, str | None):
        raise UsageError(f"{where}: {field} is {_kind(value)}, not text", hint=_HINT)
    if value is None or not value.strip():
        raise _Unusable(f"{field} is empty")
    return _encodable(where, value.rstrip("\n") + "\n\n")


def _conversation(where: str, messages: list[object], render: Render | None) -> str:
    turns = [_turn(f"{where}[{i}]", message) for i, message in enumerate(messages)]
    if not turns:
        raise _Unusable("the conversation is empty")
    if render is None:
        raise UsageError(f"{where}: a conversation, and the model has no chat template", hint=_NO_TEMPLATE_HINT)
    try:
        return render(turns)
    except UsageError as e:
        raise _Unusable(str(e)) from e


def _turn(where: str, message: object) -> dict[str, str]:
    """{"role", "content"} of a message in either form."""
    if not isinstance(message, Mapping):
        raise UsageError(f"{where}: {_kind(message)}, not a message", hint=_HINT)
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    if not isinstance(role, str):
        raise UsageError(f"{where}: the message has no role", hint=_HINT)
    if isinstance(content, list):  # parts: {"type": "text", "text": ...}, {"type": "image", ...}
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise _Unusable("a message has parts that are not text")
        content = "".join(str(text) for text in texts)
    if content is None:
        raise _Unusable("a message has no content")
    if not isinstance(content, str):
        raise UsageError(f"{where}: the message's content is {_kind(content)}, not text", hint=_HINT)
    return {"role": _ROLES.get(role, role), "content": content}


def _encodable(where: str, text: str) -> str:
    """UsageError for halves of surrogate pairs, which JSON can write and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise UsageError(f"{where}: half of a surrogate pair ({text[e.start]!r})", hint="remove that line") from e
    return text


def _kind(value: object) -> str:
    names = {"NoneType": "null", "bool": "true or false", "int": "a number", "float": "a number", "str": "a string"}
    names |= {"list": "a list", "dict": "an object"}
    return names.get(type(value).__name__, type(value).__name__)
