"""Outputs of a given structure: which tokens may come next, by a grammar that xgrammar compiles.

A grammar is compiled once a text and kept; each request walks through it with a matcher of its own.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockscale.engine.sampling import Sampling
from blockscale.engine.vocabulary import Vocabulary
from blockscale.errors import MissingDependencyError, UsageError

_CACHE_BYTES = 256 << 20  # of compiled grammars
_THREADS = 4
_MAX_CHARACTERS = 200_000  # of a grammar's text
_MAX_DEPTH = 64  # of schemas in schemas: what compiling takes grows steeply with it
_ANY_OBJECT = '{"type": "object"}'
# Words of JSON Schema that xgrammar 0.2 reads over; a schema that has one would be served wrongly in silence.
# (`oneOf` is taken as `anyOf`, and of `format` only the usual ones are kept to, as JSON Schema leaves open.)
_UNSERVED = ("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies")
_OF_ONE_SCHEMA = (
    "items",
    "additionalItems",
    "additionalProperties",
    "contains",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_OF_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")


@dataclass(frozen=True)
class Grammars:
    """What compiles grammars for one model's tokens.

    compiler    xgrammar.GrammarCompiler
    vocab_size  of the model's logits
    has_end     the model has an end token; without one, an output ends where its grammar does
    """

    compiler: Any
    vocab_size: int
    has_end: bool


def make_grammars(vocabulary: Vocabulary, vocab_size: int, end_ids: Sequence[int]) -> Grammars:
    """Takes a second or so with 100,000 tokens: make it once a model, when first needed.

    vocab_size  of the model's logits
    end_ids     the tokens that may end an output, and only where its grammar may end

    Raises MissingDependencyError without the package xgrammar.
    """
    xgrammar = _xgrammar()
    # special tokens are no text: an empty piece is never allowed
    pieces = [b"" if i in vocabulary.special else vocabulary.piece(i) for i in range(vocab_size)]
    info = xgrammar.TokenizerInfo(
        pieces, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=list(end_ids) or None
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=_THREADS, cache_limit_bytes=_CACHE_BYTES)
    return Grammars(compiler, vocab_size, bool(end_ids))


class Structure:
    """One request's way through its grammar.

    is_finished  the output is complete: its end token was taken, or its grammar ended and the model has no end token
    """

    def __init__(self, grammars: Grammars, sampling: Sampling) -> None:
        """Compiles the grammar that `sampling` asks for. UsageError where it is wrong, not served, or of texts that the
        model's tokens cannot write."""
        xgrammar = _xgrammar()
        compiled = _compiled(grammars.compiler, sampling)
        self._vocab_size = grammars.vocab_size
        self._matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=not grammars.has_end)
        if self.is_finished:
            raise UsageError(
                "the structure may be empty, and the model has no end token with which to choose that",
                hint="ask for a structure of one character or more",
            )
        first = self.mask()
        if first is not None and not first.any():
            raise UsageError("the model has no token that the structure could begin with", hint="ask for another")

    @property
    def is_finished(self) -> bool:
        return bool(self._matcher.is_terminated())

    def mask(self) -> Tensor | None:
        """int32 [ceil(V/32)] on the CPU: the tokens that may come next, a bit each. None when finished."""
        if self.is_finished:
            return None
        mask = torch.full((1, -(-self._vocab_size // 32)), -1, dtype=torch.int32)
        self._matcher.fill_next_token_bitmask(mask)
        return mask[0]

    def accept(self, token: int) -> bool:
        """Takes the token that was chosen; False, and nothing changes, where the grammar does not allow it."""
        return not self.is_finished and bool(self._matcher.accept_token(token))

    def masks_along(self, draft: Sequence[int]) -> list[Tensor | None]:
        """Masks for `ngram.rows_along`: at the draft's first token, and after each of them that the grammar allows.

        The list has one mask more than tokens of the draft are usable; cut the draft to that. Nothing changes.
        """
        masks, num_taken = [self.mask()], 0
        for token in draft:
            if not self.accept(token):
                break
            num_taken += 1
            if self.is_finished:  # its end token: nothing is chosen after it
                break
            masks.append(self.mask())
        if num_taken:
            self._matcher.rollback(num_taken)
        return masks


def _compiled(compiler: Any, sampling: Sampling) -> Any:
    """xgrammar.CompiledGrammar, from the compiler's cache where it has it."""
    if sampling.json_object:
        return compiler.compile_json_schema(_ANY_OBJECT)
    for field, text, compile_text in (
        ("json_schema", sampling.json_schema, compiler.compile_json_schema),
        ("regex", sampling.regex, compiler.compile_regex),
        ("grammar", sampling.grammar, compiler.compile_grammar),
    ):
        if text is None:
            continue
        if len(text) > _MAX_CHARACTERS:
            raise UsageError(f"{field} has {len(text):,} characters", hint=f"up to {_MAX_CHARACTERS:,} are compiled")
        if field == "json_schema":
            _check_schema(_parsed(text))
        try:
            return compile_text(text)
        except (RuntimeError, ValueError, TypeError) as e:  # whatever is wrong with a text, xgrammar says it by these
            raise UsageError(f"{field} cannot be used: {_reason(e)}", hint=f"correct the {field}") from e
    raise UsageError("no structure is asked for", hint="set json_schema, json_object, regex or grammar")


def _parsed(text: str) -> object:
    try:
        schema = json.loads(text)
    except ValueError as e:
        raise UsageError(f"json_schema is not JSON: {e}", hint="give a JSON Schema as JSON text") from None
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(schema, dict | bool):
        raise UsageError("json_schema is no schema", hint="a JSON Schema is an object")
    return schema


def _too_deep() -> UsageError:
    return UsageError("json_schema is nested too deeply", hint=f"up to {_MAX_DEPTH} levels; name parts of it in $defs")


def _check_schema(schema: object) -> None:
    for part in _schemas(schema):
        words = [word for word in _UNSERVED if word in part]
        words += ["uniqueItems"] if part.get("uniqueItems") else []
        words += ["allOf of several schemas"] if _length(part.get("allOf")) > 1 else []
        if words:
            raise UsageError(
                f"json_schema: {', '.join(words)} cannot be kept to while tokens are chosen",
                hint="leave it out, and check the output afterwards",
            )
        reference = part.get("$ref", "#")
        if not (isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))):
            raise UsageError(f"json_schema: $ref {reference!r}", hint="name schemas inside this one, like #/$defs/name")


def _schemas(schema: object) -> Iterator[dict[str, Any]]:
    """The schema and all schemas in it; not values that only look like one, as in `enum` or `default`. UsageError where
    they are nested too deeply."""
    waiting: list[tuple[object, int]] = [(schema, 1)]
    while waiting:
        part, depth = waiting.pop()
        if not isinstance(part, dict):
            continue
        if depth > _MAX_DEPTH:
            raise _too_deep()
        yield part
        inside = [part[word] for word in _OF_ONE_SCHEMA if word in part]
        for word in (*_OF_SCHEMAS, "items"):
            inside += part[word] if isinstance(part.get(word), list) else []
        for word in _OF_NAMED_SCHEMAS:
            inside += part[word].values() if isinstance(part.get(word), dict) else []
        waiting += [(schema, depth + 1) for schema in inside]


def _length(value: object) -> int:
    return len(value) if isinstance(value, list) else 0


def _reason(error: Exception) -> str:
    """The last part of xgrammar's message, which begins with a time and a place in its source."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return text.split(": ", 1)[1] if text.startswith("[") and ": " in text else text


def _xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as e:
        raise MissingDependencyError(
            "json_schema, json_object, regex and grammar need the package xgrammar", hint="pip install xgrammar"
        ) from e
    return xgrammar
