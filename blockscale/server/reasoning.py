"""What a model thinks before it answers, told apart from the answer: `<think> ... </think>` in the forms that chat
templates of reasoning models use."""

from dataclasses import dataclass

from blockscale.engine.detokenizer import num_held


@dataclass(frozen=True)
class Markers:
    """Texts around what was thought."""

    begin: str
    end: str


FORMS = (Markers("<think>", "</think>"), Markers("[THINK]", "[/THINK]"))


def markers_of(template: str) -> Markers | None:
    """The form that a chat template speaks of; None for a model that does not think aloud."""
    return next((form for form in FORMS if form.end in template), None)


def is_open(prompt: str, markers: Markers) -> bool:
    """The template has begun the thought, so that the output starts inside it."""
    return prompt.rstrip().endswith(markers.begin)


class Splitter:
    """Text in, (thought, answer) out; what may still become a marker is held back.

    A thought can only begin the output. One that never ends is all of it.
    """

    def __init__(self, markers: Markers, inside: bool) -> None:
        self._markers = markers
        self._held = ""
        self._state = "thought" if inside else "start"

    def push(self, text: str) -> tuple[str, str]:
        self._held += text
        thought = ""
        if self._state == "start":
            begun = self._held.lstrip()
            if begun.startswith(self._markers.begin):
                self._held, self._state = begun.removeprefix(self._markers.begin), "thought"
            elif self._markers.begin.startswith(begun):
                return "", ""
            else:
                self._state = "answer"
        if self._state == "thought":
            thought, found, rest = self._held.partition(self._markers.end)
            if not found:
                return self._release(len(self._held) - num_held(self._held, [self._markers.end])), ""
            self._held, self._state = rest, "after"
        if self._state == "after":  # the empty lines between thought and answer belong to neither
            self._held = self._held.lstrip("\n")
            if self._held:
                self._state = "answer"
        return thought, self._release(len(self._held))

    def finish(self) -> tuple[str, str]:
        """What was held back at the end of the output."""
        rest = self._release(len(self._held))
        return (rest, "") if self._state == "thought" else ("", rest)

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text
