"""Outputs of a given structure. Needs xgrammar."""

import json
import random
import sys

import pytest
import torch

from blockscale.engine.ngram import accepted, rows_along
from blockscale.engine.sampler import Row, sample, unpacked
from blockscale.engine.sampling import Sampling
from blockscale.engine.structure import Grammars, Structure, make_grammars
from blockscale.engine.vocabulary import Vocabulary, read_vocabulary
from blockscale.errors import MissingDependencyError, UsageError

from . import tokenizers

pytest.importorskip("xgrammar")
TOKENIZER = tokenizers.byte_level()
VOCABULARY = read_vocabulary(TOKENIZER)
END = TOKENIZER.eos_token_id
V = 350  # more logits than tokens
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "n": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "n"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return make_grammars(VOCABULARY, V, [END])


def allowed(structure: Structure) -> set[int]:
    mask = structure.mask()
    assert mask is not None
    return set(unpacked(mask[None], V)[0].nonzero()[:, 0].tolist())


def random_output(grammars: Grammars, sampling: Sampling, seed: int, limit: int = 400) -> bytes:
    """Draws from random logits through the sampler until the end token."""
    structure, generator, output = Structure(grammars, sampling), torch.Generator().manual_seed(seed), []
    while not structure.is_finished:
        logits = torch.randn(1, V, generator=generator) * 3
        sampled = sample(logits, [Row(sampling, seed, len(output), mask=structure.mask())])
        assert sampled.is_valid.all()
        output.append(int(sampled.tokens))
        assert structure.accept(output[-1])
        assert len(output) < limit
    assert output[-1] == END
    return b"".join(VOCABULARY.piece(t) for t in output[:-1])


@pytest.mark.parametrize("seed", range(4))
def test_random_logits_give_json_of_the_schema(grammars: Grammars, seed: int) -> None:
    value = json.loads(random_output(grammars, Sampling(temperature=1.0, json_schema=SCHEMA), seed))
    assert set(value) == {"name", "n"}
    assert len(value["name"]) <= 6
    assert 0 <= value["n"] <= 99


def test_random_logits_give_a_match_of_the_expression_and_the_grammar(grammars: Grammars) -> None:
    import re

    text = random_output(grammars, Sampling(temperature=1.0, regex="(bits|São){2,3}[0-9]{2}"), 1).decode()
    assert re.fullmatch("(bits|São){2,3}[0-9]{2}", text)
    text = random_output(grammars, Sampling(temperature=1.0, grammar='root ::= "a" b\nb ::= "x" | "y" b'), 2).decode()
    assert re.fullmatch("ay*x", text)


def test_json_object_allows_any_object_and_only_that(grammars: Grammars) -> None:
    structure = Structure(grammars, Sampling(json_object=True))
    assert END not in allowed(structure)
    assert not structure.accept(TOKENIZER.convert_tokens_to_ids("["))
    for token in TOKENIZER.encode('{"a": [1, {"b": null}]}'):
        assert structure.accept(token)
    assert END in allowed(structure)
    assert structure.accept(END)
    assert structure.is_finished
    assert structure.mask() is None
    assert not structure.accept(END)


def test_special_tokens_and_ids_past_the_end_are_never_allowed(grammars: Grammars) -> None:
    tokens = allowed(Structure(grammars, Sampling(regex="(.|\n)*")))
    assert END in tokens
    assert max(tokens) < len(VOCABULARY.pieces)
    assert len(tokens) > 200  # all but bytes that begin no character


def test_without_an_end_token_the_grammars_end_is_the_outputs() -> None:
    structure = Structure(make_grammars(VOCABULARY, V, []), Sampling(regex="ab"))
    for token in (TOKENIZER.convert_tokens_to_ids(c) for c in "ab"):
        assert not structure.is_finished
        assert structure.accept(token)
    assert structure.is_finished


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("json_schema", "{", "json_schema is not JSON"),
        ("json_schema", "[" * 100_000, "json_schema is nested too deeply|json_schema is not JSON"),
        ("json_schema", '{"items":' * 65 + "{}" + "}" * 65, "json_schema is nested too deeply"),
        ("regex", "a" * 200_001, "regex has 200,001 characters"),
        ("json_schema", "3", "json_schema is no schema"),
        ("json_schema", '{"type": "frob"}', "json_schema cannot be used: .*frob"),
        ("json_schema", '{"properties": {"a": {"not": {}}}}', "json_schema: not cannot be kept to"),
        ("json_schema", '{"items": {"uniqueItems": true}}', "uniqueItems"),
        ("json_schema", '{"allOf": [{"type": "integer"}, {"minimum": 3}]}', "allOf"),
        ("json_schema", '{"$defs": {"x": {"if": {}}}}', "json_schema: if "),
        ("json_schema", '{"$ref": "http://example.com/x"}', r"\$ref"),
        ("regex", "(a", "regex cannot be used: .*parenthesis"),
        ("regex", "(?=a)b", "regex cannot be used: .*Lookahead"),
        ("grammar", 'root ::= "a', "grammar cannot be used"),
        ("grammar", 'other ::= "a"', "grammar cannot be used: .*root"),
    ],
)
def test_a_bad_grammar_is_one_clear_error(grammars: Grammars, field: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Structure(grammars, Sampling(**{field: text}))
    assert caught.value.hint
    assert "cpp" not in str(caught.value)


def test_schemas_may_be_nested(grammars: Grammars) -> None:
    Structure(grammars, Sampling(json_schema='{"items":' * 30 + "{}" + "}" * 30))


def test_properties_may_be_called_like_words_of_the_schema(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"not": {"enum": [{"if": 1}]}, "uniqueItems": {"type": "integer"}}}
    Structure(grammars, Sampling(json_schema=json.dumps(schema)))


def test_drafts_are_cut_where_the_grammar_stops_them(grammars: Grammars) -> None:
    sampling = Sampling(regex="abc", temperature=1.0)
    structure = Structure(grammars, sampling)
    a, b, c, x = (TOKENIZER.convert_tokens_to_ids(t) for t in "abcx")
    before = allowed(structure)
    masks = structure.masks_along([a, b, x, c])
    assert len(masks) == 3
    assert allowed(structure) == before
    ended = structure.masks_along([a, b, c, END, a])
    assert len(ended) == 4  # nothing follows the end token
    rows = rows_along(Row(sampling, 3), [a, b], masks)
    tokens = sample(torch.zeros(3, V), rows).tokens.tolist()
    for token in accepted([a, b], tokens):
        assert structure.accept(token)


def test_many_walks_never_leave_the_grammar(grammars: Grammars) -> None:
    """Whatever is allowed is accepted, and only that."""
    choose = random.Random(5)
    structure = Structure(grammars, Sampling(json_schema=SCHEMA))
    for _ in range(40):
        if structure.is_finished:
            break
        tokens = allowed(structure)
        assert tokens
        outside = choose.choice([t for t in range(V) if t not in tokens])
        assert not structure.accept(outside)
        assert structure.accept(choose.choice(sorted(tokens)))


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(MissingDependencyError, match="xgrammar") as caught:
        make_grammars(Vocabulary((b"a",), frozenset()), 1, [])
    assert "pip install xgrammar" in caught.value.hint
