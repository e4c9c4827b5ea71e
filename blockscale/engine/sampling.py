"""What a request asks of the sampler, checked once when it is made."""

import math
from dataclasses import dataclass, fields

from blockscale.errors import UsageError
from blockscale.models.pooling import Pooling

GREEDY_BELOW = 1e-5  # a temperature under this takes the likeliest token
MAX_LOGPROBS = 20  # as in OpenAI's API
MAX_STOPS = 16
MAX_FACTOR = 1000.0  # of temperature and bias: beyond it, float32 arithmetic on logits would end in infinities


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one request are chosen, and where it ends. Everything in it is hashable and never changes.

    max_tokens          new tokens at most
    temperature         logits are divided by it; 0 takes the likeliest token, of equal ones the lowest id
    min_p               drops tokens under this share of the likeliest one's probability
    top_k               then keeps so many of the likeliest; 0: all
    top_p               then keeps the fewest of the likeliest that hold this much of what is left
    presence_penalty    taken from the logit of every token that is in the output
    frequency_penalty   taken from its logit once for every time it is in the output
    repetition_penalty  divides positive and multiplies negative logits of tokens in prompt or output; 1: off
    logit_bias          (token id, number added to its logit)
    stop                texts that end the output; they are not part of it
    stop_token_ids      tokens that end the output, besides the model's own
    seed                fixes what is drawn, whatever else runs; None: the engine picks one
    logprobs            log-probabilities of the chosen token and so many of the likeliest, of the model's own
                        distribution: before bias, penalties, temperature and structure. None: none
    prompt_logprobs     likewise for every token of the prompt but the first
    ignore_eos          the model's end tokens do not end the output
    min_tokens          nothing ends the output before so many tokens
    skip_special_tokens special tokens leave no text
    json_schema         the output is JSON text of this schema (itself JSON text)
    json_object         the output is a JSON object
    regex, grammar      the output matches this expression; this EBNF grammar, whose first rule is `root`
    pooling             no token is drawn: the prompt's hidden states become a vector. Nothing else is set beside it

    Raises UsageError, which names the field.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def is_structured(self) -> bool:
        return self.json_object or any(s is not None for s in (self.json_schema, self.regex, self.grammar))

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def is_truncated(self) -> bool:
        """Some tokens cannot be drawn, whatever their place: min_p, top_k or top_p is set."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def check_vocabulary(sampling: Sampling, vocab_size: int) -> None:
    """UsageError where a token id of the request is none of the model's. The engine calls it at submission."""
    for field, ids in (
        ("logit_bias", tuple(token for token, _ in sampling.logit_bias)),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise UsageError(
                    f"{field}: there is no token {token}", hint=f"the model's tokens are 0 to {vocab_size - 1}"
                )


def _check(sampling: Sampling) -> None:
    for field, is_good, rule in (
        ("max_tokens", _is_int(sampling.max_tokens, 1), "a whole number, 1 or more"),
        ("temperature", _is_number(sampling.temperature, 0, MAX_FACTOR), f"from 0 to {MAX_FACTOR:g}"),
        ("top_p", _is_number(sampling.top_p, 0, 1) and sampling.top_p > 0, "above 0, up to 1"),
        ("top_k", _is_int(sampling.top_k, 0), "a whole number, 0 (all) or more"),
        ("min_p", _is_number(sampling.min_p, 0, 1), "from 0 to 1"),
        ("presence_penalty", _is_number(sampling.presence_penalty, -2, 2), "from -2 to 2"),
        ("frequency_penalty", _is_number(sampling.frequency_penalty, -2, 2), "from -2 to 2"),
        ("repetition_penalty", _is_number(sampling.repetition_penalty, 0.01, 100), "from 0.01 to 100; 1 is off"),
        (
            "logit_bias",
            _is_bias(sampling.logit_bias),
            f"pairs of a token id, each once, and a number up to {MAX_FACTOR:g}",
        ),
        ("stop", _are_stops(sampling.stop), f"up to {MAX_STOPS} texts, none of them empty"),
        ("stop_token_ids", _are_ids(sampling.stop_token_ids), "a tuple of token ids"),
        ("seed", sampling.seed is None or _is_int(sampling.seed, -(2**63), 2**64 - 1), "a whole number of 64 bits"),
        ("logprobs", _is_logprobs(sampling.logprobs), f"from 0 to {MAX_LOGPROBS}"),
        ("prompt_logprobs", _is_logprobs(sampling.prompt_logprobs), f"from 0 to {MAX_LOGPROBS}"),
        ("min_tokens", _is_int(sampling.min_tokens, 0, sampling.max_tokens), "from 0 to max_tokens"),
    ):
        if not is_good:
            raise UsageError(f"{field} cannot be {getattr(sampling, field)!r}", hint=f"{field}: {rule}")
    if sampling.pooling is not None:
        others = [f.name for f in fields(sampling) if f.name != "pooling" and getattr(sampling, f.name) != f.default]
        if others:
            raise UsageError(f"{others[0]} beside pooling", hint="a vector is drawn from no distribution")
    structures = [name for name in ("json_schema", "regex", "grammar") if getattr(sampling, name) is not None]
    structures += ["json_object"] if sampling.json_object else []
    if len(structures) > 1:
        raise UsageError(f"{' and '.join(structures)} at once", hint="an output has one structure: ask for one")
    if structures and sampling.min_tokens:
        raise UsageError(f"min_tokens beside {structures[0]}", hint="a structure itself says when the output ends")


def _is_int(value: object, low: int, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object, low: float, high: float = math.inf) -> bool:
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and math.isfinite(value) and low <= value <= high  # type: ignore[arg-type, operator]


def _is_bias(value: object) -> bool:
    if not isinstance(value, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        return False
    tokens = {token for token, _ in value}
    return len(tokens) == len(value) and all(
        _is_int(t, 0) and _is_number(bias, -MAX_FACTOR, MAX_FACTOR) for t, bias in value
    )


def _are_stops(value: object) -> bool:
    return isinstance(value, tuple) and len(value) <= MAX_STOPS and all(isinstance(s, str) and s for s in value)


def _are_ids(value: object) -> bool:
    return isinstance(value, tuple) and all(_is_int(token, 0) for token in value)


def _is_logprobs(value: object) -> bool:
    return value is None or _is_int(value, 0, MAX_LOGPROBS)
