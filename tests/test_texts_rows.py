"""JSON lines and data sets: fields, conversations, broken lines."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from blockscale.errors import MissingDependencyError, UsageError
from blockscale.texts import Text, hub, read_text


def render(messages: Sequence[Mapping[str, str]]) -> str:
    if any(m["role"] == "system" for m in messages):
        raise UsageError("the chat template refuses it: no system role")
    return "".join(f"<{m['role']}>{m['content']}</>" for m in messages)


def read(tmp_path: Path, *lines: object, template: bool = True) -> Text:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return read_text(path, render if template else None)


def test_every_field_is_read(tmp_path: Path) -> None:
    hi, yo = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
    text = read(
        tmp_path,
        {"text": "one\u2028line\n"},
        "",
        {"content": "two", "text": None},
        {"messages": [hi, yo], "text": "not this"},
        {
            "conversations": [
                {"from": "human", "value": "a"},
                {"from": "gpt", "value": "b"},
                {"from": "tool", "value": ""},
            ]
        },
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]}]},
    )
    assert text.name == "rows"
    assert text.content == (
        "one\u2028line\n\ntwo\n\n<user>hi</><assistant>yo</><user>a</><assistant>b</><tool></><user>cd</>"
    )
    assert text.notices == ()


def test_rows_without_text_are_counted(tmp_path: Path) -> None:
    text = read(
        tmp_path,
        {"text": "one"},
        {"text": " "},
        {"title": "x"},
        {"messages": [{"role": "system", "content": "s"}]},
        {"messages": []},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    )
    assert text.content == "one\n\n"
    assert text.notices == ("text rows: 6 of 7 rows are left out; the first, line 2: text is empty",)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ("{'text': 1}", "not JSON"),
        ('{"text": ' + "9" * 5000 + "}", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "a list, not an object"),
        ("null", "null, not an object"),
        ('{"text": 5}', "text is a number, not text"),
        ('{"messages": {"role": "user"}}', "messages is an object, not text"),
        ('{"messages": ["hi"]}', "messages[0]: a string, not a message"),
        ('{"messages": [{"content": "hi"}]}', "messages[0]: the message has no role"),
        ('{"conversations": [{"from": "human", "value": 3}]}', "conversations[0]: the message's content is a number"),
        ('{"text": "a\\ud800b"}', "half of a surrogate pair"),
    ],
)
def test_a_broken_line_is_named(line: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        read(tmp_path, {"text": "one"}, "", line, {"text": "two"})
    assert str(error.value).startswith("text rows, line 3")
    assert why in str(error.value)
    assert error.value.hint


def test_no_usable_row(tmp_path: Path) -> None:
    for row, why in (
        ({"a": 1}, "it has none of messages"),
        ({"messages": [{"role": "system", "content": ""}]}, "refuses"),
    ):
        with pytest.raises(UsageError, match=f"text rows has no usable row; the first, line 1: .*{why}") as error:
            read(tmp_path, row, row)
        assert "messages" in error.value.hint


def test_conversations_need_a_template(tmp_path: Path) -> None:
    rows = ({"text": "one"}, {"messages": [{"role": "user", "content": "hi"}]})
    with pytest.raises(UsageError, match="line 2, messages: a conversation, and the model has no chat template"):
        read(tmp_path, *rows, template=False)


@pytest.fixture
def data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """`owner/name` with splits train and test, read by the library from the folder of that name."""
    pytest.importorskip("datasets")
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        rows = [{"text": f"{split} {i}", "chat": [{"role": "user", "content": f"{i}"}]} for i in range(3)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return "hf:owner/name"


def test_a_data_set(data_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_text(data_set) == Text("owner/name", "train 0\n\ntrain 1\n\ntrain 2\n\n")
    assert read_text(f"{data_set}:test:text").content == "test 0\n\ntest 1\n\ntest 2\n\n"
    assert read_text(f"{data_set}:default/test:chat", render).content == "<user>0</><user>1</><user>2</>"
    monkeypatch.setattr(hub, "MAX_CHARACTERS", 12)
    assert read_text(data_set).content == "train 0\n\ntrain 1\n\n"


def test_data_sets_that_cannot_be_read(data_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="row 1: there is no column 'body'") as error:
        read_text(f"{data_set}:test:body")
    assert error.value.hint == "columns: text, chat"
    for source in (f"{data_set}:validation", f"{data_set}:other/test", "hf:owner/none"):
        with pytest.raises(UsageError, match=f"{source} cannot be read") as error:
            read_text(source)
        assert "HF_HUB_OFFLINE" in error.value.hint
    for source in ("hf:", "hf:name", "hf:a/b:", "hf:a/b:c:d:e", "hf:a b/c"):
        with pytest.raises(UsageError, match="does not name a data set"):
            read_text(source)
    monkeypatch.setattr(hub, "version", lambda _: "2.14.0")
    with pytest.raises(MissingDependencyError, match="needs the package datasets, 4 or later") as error:
        read_text(data_set)
    assert "pip install" in error.value.hint


def test_a_file_of_that_name_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hf:x").write_text("a file")
    assert read_text("hf:x").content == "a file"
