"""What the text of an answer consists of: thoughts, text and calls of tools, in the form that the model writes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockscale.server import harmony, reasoning, tools
from blockscale.server.tools import Call


@dataclass(frozen=True)
class Thought:
    """A piece of what the model thinks before it answers."""

    text: str


Piece = Thought | str | Call


@dataclass(frozen=True)
class ChatForm:
    """How a model's chat template has it write, read once from the template's text.

    template   all of it; "" for a model without one
    thoughts   markers around thoughts; None: it does not think aloud, or in channels
    calls      None: the template teaches no form of calls that is read here
    """

    template: str
    thoughts: reasoning.Markers | None
    calls: tools.Form | None
    is_harmony: bool

    def markers(self, has_tools: bool) -> tuple[str, ...]:
        """Texts that the reader needs to see, special tokens or not."""
        if self.is_harmony:
            return harmony.MARKERS
        own = (self.thoughts.begin, self.thoughts.end) if self.thoughts else ()
        return own + (tools.MARKERS.get(self.calls, ()) if has_tools and self.calls else ())


def chat_form(tokenizer: Any) -> ChatForm:
    template = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, dict):  # several by name: for tools, for retrieval
        template = "\n".join(str(text) for text in template.values())
    is_harmony = harmony.is_harmony(template)
    return ChatForm(
        template,
        None if is_harmony else reasoning.markers_of(template),
        None if is_harmony else tools.form_of(template),
        is_harmony,
    )


class AnswerReader:
    """Text in, pieces out, for models whose thoughts stand between markers."""

    def __init__(self, splitter: reasoning.Splitter | None, calls: tools.CallReader | None) -> None:
        self._splitter = splitter
        self._calls = calls

    def push(self, text: str) -> list[Piece]:
        thought, rest = self._splitter.push(text) if self._splitter else ("", text)
        pieces: list[Piece] = [Thought(thought)] if thought else []
        return pieces + (self._calls.push(rest) if self._calls else [rest] if rest else [])

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._splitter:
            thought, rest = self._splitter.finish()
            pieces += [Thought(thought)] if thought else []
            if rest:
                pieces += self._calls.push(rest) if self._calls else [rest]
        return pieces + (self._calls.finish() if self._calls else [])


class ChannelReader:
    """Likewise for models that write in channels."""

    def __init__(self, reader: harmony.HarmonyReader) -> None:
        self._reader = reader

    def push(self, text: str) -> list[Piece]:
        thought, rest = self._reader.push(text)
        return [*([Thought(thought)] if thought else []), *rest]

    def finish(self) -> list[Piece]:
        thought, rest = self._reader.finish()
        return [*([Thought(thought)] if thought else []), *rest]


def answer_reader(
    form: ChatForm, prompt: str, tool_names: Sequence[str], *, is_forced: bool, is_structured: bool
) -> AnswerReader | ChannelReader:
    """The reader of one answer.

    prompt         rendered, for what the template has begun
    tool_names     of the tools that may be called
    is_forced      the structure of the output is one call as JSON
    is_structured  the output follows a grammar from its first token on, which leaves no room for thoughts
    """
    if is_forced:
        return AnswerReader(None, tools.CallReader(tools.Form.FORCED, tool_names))
    if is_structured:
        return AnswerReader(None, None)
    if form.is_harmony:
        return ChannelReader(harmony.HarmonyReader(tool_names))
    thoughts = form.thoughts
    splitter = reasoning.Splitter(thoughts, reasoning.is_open(prompt, thoughts)) if thoughts else None
    return AnswerReader(splitter, tools.CallReader(form.calls, tool_names) if form.calls and tool_names else None)
