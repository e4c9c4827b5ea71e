"""Conversations as the text that the model's own chat template makes of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blockscale.errors import UsageError
from blockscale.texts import special_tokens


def chat_renderer(tokenizer: Any) -> Callable[[Sequence[Mapping[str, str]]], str] | None:
    """A function from messages ({"role", "content"}) to text; None for a model that has no template.

    A BOS that the tokenizer puts before every text itself is left out. The function raises UsageError for what the
    template refuses, such as a role that it does not know.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    before, _ = special_tokens(tokenizer.encode)
    bos = (getattr(tokenizer, "bos_token", None) or "") if before else ""

    def render(messages: Sequence[Mapping[str, str]]) -> str:
        try:
            text = tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False)
        except Exception as e:  # a template is a program that came with the model, and can fail in every way
            raise UsageError(f"the chat template refuses it: {e}", hint="look at chat_template.jinja") from e
        return str(text).removeprefix(bos)

    return render
