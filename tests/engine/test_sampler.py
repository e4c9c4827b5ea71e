"""Tokens drawn from logits, held against plain sorting and against exact distributions. Needs nothing."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from blockscale.engine.sampler import (
    Row,
    _largest_of_parts,
    _weights,
    distribution,
    logprobs,
    sample,
    uniform,
    unpacked,
)
from blockscale.engine.sampling import Sampling

V = 40
ALPHA = 1e-4  # of a chi-square test; the draws are seeded, so that it passes always or never


def some_logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 2


def expected_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """By sorting, in float64, of one row: the textbook's way."""
    p = torch.softmax(logits.double() / sampling.temperature, -1)
    p[p < sampling.min_p * p.max()] = 0
    order = p.sort(descending=True, stable=True).indices
    p[order[sampling.top_k or len(p) :]] = 0
    p /= p.sum()
    before = p[order].cumsum(0) - p[order]
    p[order[before >= sampling.top_p]] = 0
    return p / p.sum()


SAMPLINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.3),
    Sampling(temperature=2.0, top_p=0.8),
    Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=1.5, min_p=0.1),
    Sampling(temperature=1.5, top_k=10, top_p=0.7, min_p=0.02),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_k=V + 1),
    Sampling(temperature=1.0, top_p=1e-6),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_distribution_is_that_of_plain_sorting(sampling: Sampling) -> None:
    logits = some_logits(4)
    actual = distribution(logits, [Row(sampling, 0)] * 4)
    for i in range(4):
        torch.testing.assert_close(actual[i], expected_distribution(logits[i], sampling), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_what_is_drawn_has_the_distribution(sampling: Sampling) -> None:
    logits, num = some_logits(1, seed=3), 4000
    tokens = sample(logits.expand(num, V), [Row(sampling, 11, position=i) for i in range(num)]).tokens
    expected = expected_distribution(logits[0], sampling) * num
    check_counts(tokens, expected)


def check_counts(tokens: Tensor, expected: Tensor) -> None:
    """A chi-square test; tokens that are expected less than 5 times count as one."""
    seen = torch.bincount(tokens, minlength=len(expected)).double()
    assert seen[expected == 0].sum() == 0
    is_rare = expected < 5
    seen_bins = [*seen[~is_rare].tolist(), seen[is_rare].sum().item()]
    expected_bins = [*expected[~is_rare].tolist(), expected[is_rare].sum().item()]
    pairs = [(s, e) for s, e in zip(seen_bins, expected_bins, strict=True) if e > 0]
    if len(pairs) > 1:
        assert chisquare([s for s, _ in pairs], [e for _, e in pairs]).pvalue > ALPHA


@given(
    values=st.lists(st.sampled_from([0.0, 1.0, 1.5, 3.0]), min_size=8, max_size=8),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.1]),
)
@settings(max_examples=60, deadline=None)
def test_of_equal_tokens_the_lowest_ids_are_kept(values: list[float], top_k: int, top_p: float) -> None:
    """As many as a stable sort keeps. Weights are powers of two here, so that sums are exact."""
    weights = torch.tensor([2.0 ** round(v * 2) for v in values], dtype=torch.float64)
    logits = (weights.log()).float()[None]
    kept = (distribution(logits, [Row(Sampling(temperature=1.0, top_k=top_k, top_p=top_p), 0)])[0] > 0).tolist()
    order = sorted(range(8), key=lambda i: (-values[i], i))[: top_k or 8]
    total, needed = sum(weights[i].item() for i in order), 0
    mass = 0.0
    while mass < top_p * total - 1e-4:  # float32 exponentials
        mass += weights[order[needed]].item()
        needed += 1
    assert kept == [i in order[:needed] for i in range(8)]


def test_top_k_beyond_what_topk_is_used_for() -> None:
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(1))
    for k in (1000, 1500):
        kept = distribution(logits, [Row(Sampling(temperature=1.0, top_k=k), 0)] * 2) > 0
        for i in range(2):
            assert set(kept[i].nonzero()[:, 0].tolist()) == set(logits[i].topk(k).indices.tolist())


def test_top_p_beyond_what_topk_is_used_for() -> None:
    """A peaked row, a flat one, and both at once."""
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(2))
    logits[0] *= 4
    row = Row(Sampling(temperature=1.0, top_p=0.8), 0)
    kept = sample_kept(logits, row)
    assert kept[0].sum() < 1024 < kept[1].sum()
    for i in range(2):
        expected = expected_distribution(logits[i], row.sampling)
        # weights are float32: the token at the edge may differ
        assert ((expected > 0) != kept[i]).sum() <= 1
        assert torch.equal(sample_kept(logits[i : i + 1], row)[0], kept[i])
    beside = _weights(logits, logits.amax(-1), [row, Row(Sampling(temperature=1.0), 0)]) > 0
    assert torch.equal(beside[0], kept[0])
    assert beside[1].all()


def sample_kept(logits: Tensor, row: Row) -> Tensor:
    weights = _weights(logits, logits.amax(-1), [row] * len(logits))
    return weights > 0


def test_greedy_takes_the_likeliest_and_of_equal_ones_the_lowest_id() -> None:
    logits = torch.zeros(3, V)
    logits[0, [7, 30]] = 5
    logits[1, 39] = 1
    assert sample(logits, [Row(Sampling(), i) for i in range(3)]).tokens.tolist() == [7, 39, 0]


def test_a_draw_does_not_depend_on_the_rows_beside_it() -> None:
    mixed = [*SAMPLINGS, Sampling(), Sampling(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5)]
    rows = [Row(s, seed=i, position=i * 3, prompt=[1, 2], output=[3, 3, 4]) for i, s in enumerate(mixed)]
    logits = some_logits(len(rows), seed=5)
    together = sample(logits, rows).tokens.tolist()
    assert together == [sample(logits[i : i + 1], [row]).tokens.item() for i, row in enumerate(rows)]
    backwards = sample(logits.flip(0), rows[::-1]).tokens.tolist()
    assert together == backwards[::-1]


def test_seed_and_place_decide_and_nothing_else() -> None:
    logits, sampling = torch.zeros(200, 1000), Sampling(temperature=1.0)
    first = sample(logits, [Row(sampling, 1, position=i) for i in range(200)]).tokens
    assert torch.equal(first, sample(logits, [Row(sampling, 1, position=i) for i in range(200)]).tokens)
    other_seed = sample(logits, [Row(sampling, 2, position=i) for i in range(200)]).tokens
    # 1000 equally likely tokens: two rows agree once in a thousand
    assert (first == other_seed).sum() < 10
    assert (first[1:] == first[:-1]).sum() < 10
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


def test_uniform_numbers_are_uniform() -> None:
    numbers = [uniform(seed, place) for seed in range(40) for place in range(100)]
    assert all(0 < x < 1 for x in numbers)
    counts = torch.histc(torch.tensor(numbers), 20, 0, 1)
    assert chisquare(counts.numpy()).pvalue > ALPHA


def test_penalties_by_their_formulas() -> None:
    logits = some_logits(1)
    prompt, output = [1, 2, 2], [2, 5, 5, 5]
    sampling = Sampling(temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.3, presence_penalty=0.7)
    expected = logits[0].clone()
    for token in {*prompt, *output}:
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token in set(output):
        expected[token] -= 0.3 * output.count(token) + 0.7
    actual = distribution(logits, [Row(sampling, 0, prompt=prompt, output=output)])[0]
    torch.testing.assert_close(actual, torch.softmax(expected.double(), -1), atol=1e-6, rtol=1e-5)


def test_bias_moves_a_token_and_leaves_the_given_logits() -> None:
    logits = some_logits(2)
    before = logits.clone()
    rows = [Row(Sampling(logit_bias=((17, 100.0),)), 0), Row(Sampling(), 0)]
    assert sample(logits, rows).tokens.tolist() == [17, int(logits[1].argmax())]
    assert torch.equal(logits, before)


def test_nothing_ends_before_min_tokens() -> None:
    logits = torch.zeros(2, V)
    logits[:, 4], logits[:, 9], logits[:, 6] = 9, 8, 7
    sampling = Sampling(min_tokens=3, stop_token_ids=(9,))
    rows = [Row(sampling, 0, position=place, end_ids=[4]) for place in (2, 3)]
    assert sample(logits, rows).tokens.tolist() == [6, 4]


def test_a_mask_allows_what_its_bits_say() -> None:
    allowed = [0, 31, 32, 39]
    words = torch.zeros(2, dtype=torch.int64)
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    mask = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    assert unpacked(mask[None], V)[0].nonzero()[:, 0].tolist() == allowed
    logits = some_logits(300, seed=8)
    tokens = sample(logits, [Row(Sampling(temperature=5.0), 3, position=i, mask=mask) for i in range(300)]).tokens
    assert set(tokens.tolist()) == set(allowed)


def test_a_row_without_a_valid_choice_is_told_and_spoils_no_other() -> None:
    logits = some_logits(4)
    logits[0, 3] = math.nan
    logits[1] = -math.inf
    logits[2, 5] = math.inf
    for temperature in (0.0, 1.0):
        row = Row(Sampling(temperature=temperature, top_p=0.9 if temperature else 1.0), 1)
        sampled = sample(logits, [row] * 4)
        assert sampled.is_valid.tolist() == [False, False, False, True]
        assert sampled.tokens[3] == sample(logits[3:], [row]).tokens[0]
        assert sampled.tokens.max() < V


def test_one_impossible_token_is_no_harm() -> None:
    logits = some_logits(1)
    logits[0, 5] = -math.inf
    sampled = sample(logits.expand(200, V), [Row(Sampling(temperature=3.0), 0, position=i) for i in range(200)])
    assert sampled.is_valid.all()
    assert 5 not in sampled.tokens.tolist()


def test_logprobs_are_the_models_own() -> None:
    logits = some_logits(2)
    logits[1, [9, 3, 21]] = 20.0  # equal, and the likeliest
    found = logprobs(logits, torch.tensor([4, 3]), 5)
    reference = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(found.chosen.double(), reference[[0, 1], [4, 3]], atol=1e-5, rtol=1e-5)
    assert found.top_ids[1, :3].tolist() == [3, 9, 21]
    for i in range(2):
        expected = reference[i].sort(descending=True, stable=True)
        assert found.top_ids[i].tolist() == expected.indices[:5].tolist()
        torch.testing.assert_close(found.top[i].double(), expected.values[:5], atol=1e-5, rtol=1e-5)
    none = logprobs(logits, torch.tensor([4, 3]), 0)
    assert none.top_ids.shape == none.top.shape == (2, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampling_takes_no_step_for_each_token_of_the_vocabulary(temperature: float) -> None:
    """Nor for each row: the number of torch calls stays."""
    assert len({num_calls(rows, v, temperature) for rows, v in ((7, 50), (7, 3000), (30, 50))}) == 1


def num_calls(rows: int, vocab_size: int, temperature: float) -> int:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.calls += 1
            return func(*args, **(kwargs or {}))

    sampling: Sequence[Row] = [
        Row(Sampling(temperature=temperature, top_p=0.9 if temperature else 1.0, presence_penalty=0.1), i, output=[1])
        for i in range(rows)
    ]
    logits = torch.zeros(rows, vocab_size)
    logits[:, 3] = 20.0
    with Counter() as counter:
        sample(logits, sampling)
    return counter.calls


@pytest.mark.parametrize("vocab_size", [97, 1024, 128_256, 151_936])
def test_the_largest_of_parts_is_the_first_of_the_row(vocab_size: int) -> None:
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(0)).round(decimals=1)  # many are equal
    logits[1, vocab_size // 2] = torch.nan
    logits[2, -1] = 99.0
    largest, tokens = _largest_of_parts(logits)
    assert torch.equal(largest.nan_to_num(7), logits.amax(-1).nan_to_num(7))
    assert torch.equal(tokens, torch.from_numpy(logits.numpy().argmax(-1)))
