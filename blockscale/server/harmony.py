"""gpt-oss' output: messages in channels.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
"""

import re
from collections.abc import Sequence

from blockscale.engine.detokenizer import num_held
from blockscale.server.tools import Call, calls_in, named_call

MARKERS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|return|>", "<|constrain|>")
FINAL = "<|channel|>final<|message|>"  # behind a prompt: the answer begins at once
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.-]+)")


def is_harmony(template: str) -> bool:
    return "<|channel|>" in template and "<|message|>" in template


class HarmonyReader:
    """Text in; (thought, rest) out, where the rest is text and calls. A call comes out whole."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._header: str | None = None  # of the message that is being read; None between messages

    def push(self, text: str) -> tuple[str, list[str | Call]]:
        self._held += text
        thought, rest = "", list[str | Call]()
        while True:
            if self._header is None:
                header, found, after = self._held.partition("<|message|>")
                if not found:
                    return thought, rest
                self._header, self._held = header, after
            end = _END.search(self._held)
            if end is None:
                length = 0 if self._called() else len(self._held) - num_held(self._held, _ENDS)
                body, self._held = self._held[:length], self._held[length:]
            else:
                body, self._held = self._held[: end.start()], self._held[end.end() :]
            new_thought, new_rest = self._message(body) if body else ("", [])
            thought += new_thought
            rest += new_rest
            if end is None:
                return thought, rest
            self._header = None

    def finish(self) -> tuple[str, list[str | Call]]:
        """What was held back, at the end of the output: the end token itself leaves no text."""
        body, self._held = self._held, ""
        if self._header is None:  # no message: what came is shown, but for the markers of a message that only began
            text = "" if _CHANNEL.search(body) or body.strip() in ("", "assistant") else body
            return "", [text] if text else []
        return self._message(body) if body else ("", [])

    def _called(self) -> str | None:
        found = _RECIPIENT.search(self._header or "")
        return found[1] if found else None

    def _message(self, body: str) -> tuple[str, list[str | Call]]:
        name = self._called()
        if name is not None:
            return "", list(calls_in(named_call(name, body), self._names)) or [body]
        channel = _CHANNEL.search(self._header or "")
        return (body, []) if channel and channel[1] == "analysis" else ("", [body])
