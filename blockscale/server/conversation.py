"""Messages to a prompt, through the model's own chat template."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockscale.server.failure import ApiError, unserved, wrong_value
from blockscale.server.protocol import ChatRequest, Function, Message
from blockscale.server.service import Service

_NAME_IS_SHOWN = re.compile(r"message(\.name|\[['\"]name['\"]\])")
_OWN_SETTINGS = frozenset(  # arguments of the renderer, not settings of a template
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    )
)


@dataclass(frozen=True)
class Rendered:
    """A prompt as text and as tokens."""

    text: str
    ids: tuple[int, ...]

    async def followed_by(self, service: Service, text: str) -> "Rendered":
        return await tokens_of(service, self.text + text)


async def tokens_of(service: Service, text: str) -> Rendered:
    """Special tokens are those that the template wrote."""
    ids = await service.with_tokenizer(lambda t: t(text, add_special_tokens=False)["input_ids"])
    return Rendered(text, tuple(ids))


async def render(service: Service, body: ChatRequest, tools: Sequence[Function], is_structured: bool) -> Rendered:
    """The prompt of a chat request. ApiError (400) for what the template refuses or does not know."""
    settings = dict(body.chat_template_kwargs or {})
    reserved = sorted(_OWN_SETTINGS & settings.keys())
    if reserved:
        raise wrong_value("chat_template_kwargs", f"chat_template_kwargs cannot set {reserved[0]}")
    unknown = sorted(name for name in settings if name not in service.form.template)
    if unknown:
        raise wrong_value("chat_template_kwargs", f"the chat template knows no setting '{unknown[0]}'")
    if body.reasoning_effort is not None:
        if "reasoning_effort" not in service.form.template:
            raise unserved("reasoning_effort", "the model's chat template knows no such setting")
        settings["reasoning_effort"] = body.reasoning_effort
    if is_structured and "enable_thinking" in service.form.template:
        settings.setdefault("enable_thinking", False)  # a grammar leaves no room for thoughts
    return await render_messages(service, body.messages, tools, settings)


async def render_messages(
    service: Service,
    messages: Sequence[Message],
    tools: Sequence[Function] = (),
    settings: dict[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> Rendered:
    if not service.form.template:
        raise ApiError("the model has no chat template", code="no_chat_template", hint="use /v1/completions")
    plain = [_plain(service, message, i) for i, message in enumerate(messages)]
    declared = [{"type": "function", "function": function.model_dump(exclude_none=True)} for function in tools]
    for tool in declared:
        tool["function"].pop("strict", None)  # type: ignore[attr-defined]

    def apply(tokenizer: Any) -> str:
        return str(
            tokenizer.apply_chat_template(
                plain,
                tools=declared or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **(settings or {}),
            )
        )

    try:
        text = await service.with_tokenizer(apply)
    except Exception as error:  # a template is a program that came with the model, and can fail in every way
        raise wrong_value("messages", f"the chat template refuses the messages: {error}") from error
    return await tokens_of(service, text)


def _plain(service: Service, message: Message, index: int) -> dict[str, Any]:
    """A message as templates read it: text, and arguments of calls as objects."""
    template = service.form.template
    where = f"messages.{index}"
    role = message.role
    if role == "developer" and "developer" not in template:
        role = "system"
    if message.content is None and (role != "assistant" or not message.tool_calls):
        raise wrong_value(f"{where}.content", f"the {message.role} message has no content")
    plain: dict[str, Any] = {"role": role, "content": _text(message)}
    if message.name is not None:
        if not _NAME_IS_SHOWN.search(template) and role != "tool":
            raise unserved(f"{where}.name", "the model's chat template shows no names")
        plain["name"] = message.name
    if message.reasoning_content is not None:
        if role != "assistant":
            raise wrong_value(f"{where}.reasoning_content", "only an assistant's message has thoughts")
        plain["reasoning_content"] = plain["thinking"] = message.reasoning_content
    if message.tool_calls:
        if role != "assistant":
            raise wrong_value(f"{where}.tool_calls", "only an assistant's message has calls")
        plain["tool_calls"] = [_plain_call(call, where) for call in message.tool_calls]
    if (message.tool_call_id is not None) != (role == "tool"):
        raise wrong_value(f"{where}.tool_call_id", "tool_call_id stands in every tool message and in no other")
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _text(message: Message) -> str:
    content = message.content
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""


def _plain_call(call: Any, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError:
        raise wrong_value(f"{where}.tool_calls", "the arguments of a call are not JSON") from None
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
