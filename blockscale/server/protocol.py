"""The requests of OpenAI's API, checked strictly: a field that is unknown here is refused, and so is one that cannot be
served, unless its value asks for nothing (`null`, or what the server does anyway).

Beyond OpenAI's fields, the sampler's own are taken under its own names: top_k, min_p, repetition_penalty, min_tokens,
stop_token_ids, ignore_eos, skip_special_tokens, regex and grammar.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from blockscale.engine.sampling import Sampling
from blockscale.server.failure import ApiError, unserved

_MAX_DEPTH = 200  # of a body: what walks through it by recursion must not exhaust the stack
_MAX_DIGITS = 19  # of a token id: an int64
NonEmpty = Annotated[str, StringConstraints(min_length=1)]
Count = Annotated[int, Field(ge=0)]

_SAMPLER_FIELDS = (  # of the same name and meaning in the sampler
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "regex",
    "grammar",
)
# Field -> (values that ask for nothing, why anything else is refused)
_UNSERVED_ANYWHERE: dict[str, tuple[tuple[object, ...], str]] = {
    "service_tier": (("auto", "default"), "there is one tier, the default"),
    "metadata": (({},), "it is kept with stored completions, and nothing is stored"),
    "store": ((False,), "nothing is stored"),
    "moderation": ((), "there is no moderation model"),
}
_UNSERVED_IN_CHAT = {
    **_UNSERVED_ANYWHERE,
    "audio": ((), "the model writes text"),
    "modalities": ((["text"],), "the model writes text"),
    "prediction": ((), "drafts come from the request's own tokens"),
    "web_search_options": ((), "the server searches nothing"),
    "verbosity": (("medium",), "the model knows no such setting; say it in a message"),
    "function_call": ((), "it is the old form of tool_choice"),
    "functions": (([],), "it is the old form of tools"),
    "prompt_cache_options": ((), "prefixes are cached by content until their pages are needed"),
    "prompt_cache_retention": (("in_memory",), "prefixes are cached in memory until their pages are needed"),
}
_UNSERVED_IN_COMPLETIONS = {**_UNSERVED_ANYWHERE, "suffix": (("",), "the model continues text and fills no gaps")}


_STRICT = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(BaseModel):
    model_config = _STRICT

    include_usage: bool = False
    include_obfuscation: Literal[False] = False  # padding against readers of packet lengths: none is sent


class Sampled(BaseModel):
    """What chat and completions share. None: the default of the server."""

    model_config = _STRICT

    model: NonEmpty
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[Count] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    regex: NonEmpty | None = None
    grammar: NonEmpty | None = None
    user: str | None = None  # written to the log beside the request
    safety_identifier: str | None = None  # likewise
    prompt_cache_key: str | None = None  # a hint about shared prefixes, which are found by their content


class CompletionRequest(Sampled):
    prompt: str | list[str] | list[Count] | list[list[Count]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_special_tokens: bool = True


class FunctionCall(BaseModel):
    model_config = _STRICT

    name: NonEmpty
    arguments: str  # JSON text


class ToolCall(BaseModel):
    model_config = _STRICT

    id: NonEmpty
    type: Literal["function"]
    function: FunctionCall


class TextPart(BaseModel):
    model_config = _STRICT

    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = _STRICT

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # what an earlier answer thought, for templates that show it
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[None] | None = None


class Function(BaseModel):
    model_config = _STRICT

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = _STRICT

    type: Literal["function"]
    function: Function


class ChosenFunction(BaseModel):
    model_config = _STRICT

    name: NonEmpty


class ChosenTool(BaseModel):
    model_config = _STRICT

    type: Literal["function"]
    function: ChosenFunction


class JsonSchema(BaseModel):
    model_config = _STRICT

    name: NonEmpty
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None  # the schema is kept either way


class ResponseFormat(BaseModel):
    model_config = _STRICT

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(Sampled):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingRequest(BaseModel):
    model_config = _STRICT

    model: NonEmpty
    input: str | list[str] | list[Count] | list[list[Count]]
    dimensions: Annotated[int, Field(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None


class TokenizeRequest(BaseModel):
    """One of `prompt` and `messages`."""

    model_config = _STRICT

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(BaseModel):
    model_config = _STRICT

    model: str | None = None
    tokens: list[Count]
    skip_special_tokens: bool = False


_UNSERVED: dict[type[BaseModel], Mapping[str, tuple[tuple[object, ...], str]]] = {
    ChatRequest: _UNSERVED_IN_CHAT,
    CompletionRequest: _UNSERVED_IN_COMPLETIONS,
}
Request = TypeVar("Request", bound=BaseModel)


def parse(kind: type[Request], body: bytes) -> Request:
    """A request from its bytes. ApiError (400), which names the field, for what is not UTF-8, JSON or of `kind`."""
    data = read_json(body)
    if not isinstance(data, dict):
        raise ApiError("the body is not a JSON object", code="invalid_json")
    for field, (harmless, why) in _UNSERVED.get(kind, {}).items():
        if field in data:
            value = data.pop(field)
            if value is not None and value not in harmless:
                raise unserved(field, why)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _refusal(error) from None


def read_json(body: bytes) -> Any:
    """Strict JSON: no NaN, no half surrogate pairs, no nesting that exhausts the stack."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8 at byte {error.start}", code="invalid_utf8") from None
    try:
        data = json.loads(text, parse_constant=_no_constant)
        if "\\u" in text:  # the only way to a surrogate without its other half, which no tokenizer can read
            json.dumps(data, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ApiError("a string holds half of a surrogate pair", code="invalid_utf8") from None
    except RecursionError:
        raise ApiError("the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}", code="invalid_json") from None
    if _is_deep(data):
        raise ApiError("the body is nested too deeply", code="invalid_json", hint=f"up to {_MAX_DEPTH} levels")
    return data


def _is_deep(data: Any) -> bool:
    level = [data]
    for _ in range(_MAX_DEPTH + 1):
        parts = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        level = [inner for part in parts for inner in part if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _refusal(error: ValidationError) -> ApiError:
    """The first fault, in the words of the one who sent it."""
    faults = error.errors(include_url=False, include_input=False)
    # of a union, the branch that went deepest is the one that was meant
    fault = max(faults, key=lambda f: len(f["loc"])) if _is_one_field(faults) else faults[0]
    where = ".".join(str(part) for part in _field_path(fault["loc"]))
    if fault["type"] == "extra_forbidden":
        return ApiError(f"there is no field '{where}'", param=where, code="unknown_parameter")
    if fault["type"] == "missing":
        return ApiError(f"'{where}' is missing", param=where, code="missing_required_parameter")
    return ApiError(f"'{where}': {fault['msg']}", param=where, code="invalid_value")


def _is_one_field(faults: list[Any]) -> bool:
    return len({fault["loc"][:1] for fault in faults}) == 1


def _field_path(location: tuple[int | str, ...]) -> list[int | str]:
    """Without the names that pydantic gives to branches of a union."""
    inner = [part for part in location[1:] if isinstance(part, int) or (part.islower() and part.isidentifier())]
    return [*location[:1], *(part for part in inner if part not in ("str", "int"))]


def texts_or_tokens(given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The parts of a text, a list of token ids, or a list of either."""
    if isinstance(given, str):
        return [given]
    ids = [token for token in given if isinstance(token, int)]
    return [ids] if ids else [one for one in given if not isinstance(one, int)]


def stops(stop: str | list[str] | None) -> tuple[str, ...]:
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def sampling_of(request: Sampled, max_tokens: int, **more: Any) -> Sampling:
    """What the sampler is asked for. `max_tokens` is the number to ask for, `more` what the endpoint adds.

    UsageError, which names the field, for what the sampler refuses.
    """
    given = {name: getattr(request, name) for name in _SAMPLER_FIELDS if getattr(request, name) is not None}
    return Sampling(
        max_tokens=max_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        logit_bias=logit_bias_pairs(request.logit_bias),
        stop=stops(request.stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        **{**given, **more},
    )


def logit_bias_pairs(bias: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    """JSON has no integer keys: {"50256": -100} -> ((50256, -100.0),). ApiError for a key that is no token id."""
    pairs = []
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= _MAX_DIGITS):
            raise ApiError(f"logit_bias: '{key[:40]}' is no token id", param="logit_bias", code="invalid_value")
        if not -100 <= value <= 100:
            raise ApiError(f"logit_bias: {value} is not from -100 to 100", param="logit_bias", code="invalid_value")
        pairs.append((int(key), float(value)))
    return tuple(pairs)
