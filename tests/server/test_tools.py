"""Calls and thoughts in a model's output, however the text is cut. Needs nothing."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockscale.server.answer import ChatForm, Piece, Thought, answer_reader
from blockscale.server.failure import ApiError
from blockscale.server.harmony import is_harmony
from blockscale.server.reasoning import FORMS, markers_of
from blockscale.server.tools import Call, Form, call_schema, form_of

WEATHER = '{"name": "weather", "arguments": {"city": "S\u00e3o Paulo"}}'
CALL = Call("weather", '{"city": "S\u00e3o Paulo"}')
CLOCK = Call("clock", "{}")
# form, output, thoughts, pieces of text joined, calls
CASES: list[tuple[object, str, str, str, list[Call]]] = [
    (Form.HERMES, "no call here", "", "no call here", []),
    (Form.HERMES, f"I look.\n<tool_call>\n{WEATHER}\n</tool_call>", "", "I look.", [CALL]),
    (
        Form.HERMES,
        f'<tool_call>{WEATHER}</tool_call>\n<tool_call>{{"name": "clock"}}</tool_call>',
        "",
        "",
        [CALL, CLOCK],
    ),
    (Form.HERMES, f"<tool_call>\n{WEATHER}\n", "", "", [CALL]),  # the end marker was the end token
    (Form.HERMES, '<tool_call>{"name": "other"}</tool_call>', "", '<tool_call>{"name": "other"}</tool_call>', []),
    (Form.HERMES, "<tool_call>{broken</tool_call> on", "", "<tool_call>{broken</tool_call> on", []),
    (Form.HERMES, "a < b, <tool", "", "a < b, <tool", []),
    (
        Form.HERMES,
        f"<think>\nhm <tool_call>x\n</think>\n\n<tool_call>{WEATHER}</tool_call>",
        "\nhm <tool_call>x\n",
        "",
        [CALL],
    ),
    (Form.HERMES, "<think>never ends", "never ends", "", []),
    (Form.HERMES, "so: <think> is a word", "", "so: <think> is a word", []),
    (Form.LLAMA, WEATHER.replace("arguments", "parameters"), "", "", [CALL]),
    (Form.LLAMA, f'<|python_tag|>{WEATHER}; {{"name": "clock", "parameters": {{}}}}', "", "", [CALL, CLOCK]),
    (Form.LLAMA, '{"city": "Recife"}', "", '{"city": "Recife"}', []),
    (Form.LLAMA, f"Plain: {WEATHER}", "", f"Plain: {WEATHER}", []),
    (Form.MISTRAL, f"[TOOL_CALLS][{WEATHER}]", "", "", [CALL]),
    (
        Form.MISTRAL,
        '[TOOL_CALLS]weather[ARGS]{"city": "S\u00e3o Paulo"}[TOOL_CALLS]clock[ARGS]{}',
        "",
        "",
        [CALL, CLOCK],
    ),
    (Form.MISTRAL, "[TOOL_CALLS]what", "", "[TOOL_CALLS]what", []),
    (
        "harmony",
        "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>final<|message|>Hi <b>",
        "think",
        "Hi <b>",
        [],
    ),
    (
        "harmony",
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "S\u00e3o Paulo"}<|call|>',
        "",
        "",
        [CALL],
    ),
    ("harmony", "<|channel|>commentary to=functions.other<|message|>{}", "", "{}", []),
    ("harmony", "no channels at all", "", "no channels at all", []),
]


def read(form: object, chunks: list[str]) -> list[Piece]:
    chat = ChatForm("", FORMS[0], form if isinstance(form, Form) else None, form == "harmony")
    reader = answer_reader(chat, "", ["weather", "clock"], is_forced=False, is_structured=False)
    return [piece for chunk in chunks for piece in reader.push(chunk)] + reader.finish()


def check(pieces: list[Piece], thought: str, text: str, calls: list[Call]) -> None:
    assert "".join(p.text for p in pieces if isinstance(p, Thought)) == thought
    assert "".join(p for p in pieces if isinstance(p, str)) == text
    assert [p for p in pieces if isinstance(p, Call)] == calls


@pytest.mark.parametrize(("form", "output", "thought", "text", "calls"), CASES)
def test_whole_and_letter_by_letter(form: object, output: str, thought: str, text: str, calls: list[Call]) -> None:
    check(read(form, [output]), thought, text, calls)
    check(read(form, list(output)), thought, text, calls)


@given(st.data())
def test_cuts_change_nothing(data: st.DataObject) -> None:
    form, output, thought, text, calls = data.draw(st.sampled_from(CASES))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(output)), max_size=6)) | {0, len(output)})
    check(read(form, [output[a:b] for a, b in itertools.pairwise(cuts)]), thought, text, calls)


def test_text_flows_before_the_answer_ends() -> None:
    chat = ChatForm("", None, Form.HERMES, False)
    reader = answer_reader(chat, "", ["clock"], is_forced=False, is_structured=False)
    assert reader.push("Hello wor") == ["Hello wor"]
    assert reader.push("ld <to") == ["ld"]  # may become a call, and then the space goes too
    assert reader.push("morrow>") == [" <tomorrow>"]


def test_a_template_may_begin_the_thought() -> None:
    chat = ChatForm("", FORMS[0], None, False)
    reader = answer_reader(chat, "<|assistant|><think>\n", [], is_forced=False, is_structured=False)
    check(reader.push("a</think>b") + reader.finish(), "a", "b", [])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("... <tool_call> ...", Form.HERMES),
        ("[TOOL_CALLS]", Form.MISTRAL),
        ('{"name": x, "parameters": y}', Form.LLAMA),
        ("<tool_call>\n<function=name>", None),
        ("{{ message.content }}", None),
    ],
)
def test_forms_are_read_from_templates(template: str, form: Form | None) -> None:
    assert form_of(template) is form
    assert markers_of(template) is None
    assert not is_harmony(template)


def test_schema_of_a_forced_call() -> None:
    parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "integer"}}}
    schema = json.loads(call_schema([{"name": "f", "parameters": parameters}]))
    assert schema["$defs"] == {"X": {"type": "integer"}}
    assert "$defs" not in schema["properties"]["arguments"]
    assert schema["properties"]["name"] == {"const": "f"}
    other = {"type": "object", "$defs": {"X": {"type": "string"}}}
    both = [{"name": "f", "parameters": parameters}, {"name": "g", "parameters": other}]
    with pytest.raises(ApiError, match="differently"):
        call_schema(both)
