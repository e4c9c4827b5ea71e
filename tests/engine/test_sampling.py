"""What a request may ask for. Needs nothing."""

from dataclasses import replace
from typing import Any

import pytest

from blockscale.engine.sampling import Sampling, check_vocabulary
from blockscale.errors import UsageError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1001.0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("logit_bias", ((1, float("nan")),)),
        ("logit_bias", ((1, 1e39),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("repetition_penalty", 1e-30),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", [(1, 1.0)]),
        ("stop", ("",)),
        ("stop", "end"),
        ("stop", tuple("abcdefghijklmnopq")),
        ("stop_token_ids", (-1,)),
        ("seed", 2**64),
        ("seed", "1"),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("min_tokens", 129),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{field} cannot be") as caught:
        Sampling(**{field: value})
    assert caught.value.hint.startswith(field)


def test_the_bounds_themselves_are_allowed() -> None:
    sampling = Sampling(
        max_tokens=1,
        temperature=0,
        top_p=1,
        min_p=1,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias=((0, -100),),
        stop=("\n",),
        seed=2**64 - 1,
        logprobs=0,
        min_tokens=1,
    )
    assert hash(sampling) == hash(replace(sampling))


def test_an_output_has_one_structure() -> None:
    with pytest.raises(UsageError, match="regex and json_object at once"):
        Sampling(regex="a", json_object=True)
    with pytest.raises(UsageError, match="min_tokens beside grammar"):
        Sampling(grammar='root ::= "a"', min_tokens=2)
    assert Sampling(json_schema="{}").is_structured
    assert not Sampling().is_structured


def test_tokens_of_a_request_must_be_the_models() -> None:
    check_vocabulary(Sampling(logit_bias=((9, 1.0),), stop_token_ids=(0,)), 10)
    with pytest.raises(UsageError, match="logit_bias: there is no token 10"):
        check_vocabulary(Sampling(logit_bias=((10, 1.0),)), 10)
    with pytest.raises(UsageError, match="stop_token_ids: there is no token 12"):
        check_vocabulary(Sampling(stop_token_ids=(3, 12)), 10)


def test_what_counts_as_greedy() -> None:
    assert Sampling().is_greedy
    assert Sampling(temperature=1e-6).is_greedy
    assert not Sampling(temperature=1e-3).is_greedy
