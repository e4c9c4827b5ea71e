"""Proposals from a text's own past, and that they change no output. Needs nothing."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from blockscale.engine.ngram import NgramIndex, accepted, rows_along
from blockscale.engine.sampler import Row, distribution, sample
from blockscale.engine.sampling import Sampling

V = 6


def plain_proposal(tokens: list[int], num: int, smallest: int, largest: int) -> list[int]:
    """By looking through the whole text."""
    for size in range(min(largest, len(tokens) - 1), smallest - 1, -1):
        for at in range(len(tokens) - 1, size - 1, -1):
            if tokens[at - size : at] == tokens[len(tokens) - size :]:
                text = list(tokens)
                for i in range(num):
                    text.append(text[at + i])
                return text[len(tokens) :]
    return []


@given(
    st.lists(st.integers(0, 2), max_size=30), st.integers(0, 6), st.integers(1, 3), st.integers(0, 2), st.integers(1, 5)
)
@settings(max_examples=200, deadline=None)
def test_the_latest_longest_match_is_copied(tokens: list[int], num: int, smallest: int, more: int, step: int) -> None:
    index = NgramIndex((), smallest, smallest + more)
    for start in range(0, len(tokens), step):  # grows as an output does
        index.extend(tokens[start : start + step])
    assert index.propose(num) == plain_proposal(tokens, num, smallest, smallest + more)


def test_a_text_that_repeats_itself_is_taken_to_go_on() -> None:
    assert NgramIndex([1, 2, 3, 1, 2, 3]).propose(7) == [1, 2, 3, 1, 2, 3, 1]
    assert NgramIndex([5, 5, 5]).propose(3) == [5, 5, 5]
    assert NgramIndex([1, 2, 3, 4]).propose(3) == []


def test_what_is_accepted() -> None:
    assert accepted([1, 2, 3], [1, 2, 3, 4]) == [1, 2, 3, 4]
    assert accepted([1, 2, 3], [1, 5, 3, 4]) == [1, 5]
    assert accepted([1], [2, 9]) == [2]
    assert accepted([], [7]) == [7]


def model(tokens: list[int]) -> Tensor:
    """[V] logits that depend on the last two tokens, with a liking for repetition."""
    seed = hash((0, *tokens[-2:])) % 1000
    return torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 1.5


def generate(sampling: Sampling, seed: int, num: int, max_draft: int) -> tuple[list[int], int]:
    """The output, and the passes of the model that it took."""
    prompt, output, passes = [1, 2, 3, 1, 2], [], 0
    index = NgramIndex(prompt)
    while len(output) < num:
        draft = index.propose(min(max_draft, num - len(output) - 1))
        row = Row(sampling, seed, len(output), prompt, list(output))
        rows = rows_along(row, draft)
        logits = torch.stack([model([*prompt, *output, *draft[:i]]) for i in range(len(draft) + 1)])
        new = accepted(draft, sample(logits, rows).tokens.tolist())
        passes += 1
        output += new
        index.extend(new)
    return output, passes


SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_p=0.8, top_k=4),
    Sampling(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.2),
    Sampling(repetition_penalty=1.1, presence_penalty=0.4),
)


def test_the_output_is_the_same_with_and_without() -> None:
    saved = 0
    for sampling in SAMPLINGS:
        for seed in range(4):
            plain, passes = generate(sampling, seed, 40, 0)
            assert passes == 40
            speculated, fewer = generate(sampling, seed, 40, 5)
            assert speculated == plain
            saved += passes - fewer
    assert saved > 100  # and proposals were accepted at all


def test_the_distribution_of_what_follows_a_proposal_is_the_models() -> None:
    """Over seeds: first token by the model, second by the model given the first, whatever was proposed."""
    prompt, num = [0, 1], 5000
    first = int(model(prompt).argmax())
    draft = [first, int(model([*prompt, first]).topk(2).indices[1])]
    sampling = Sampling(temperature=1.2, top_k=5)
    logits = torch.stack([model([*prompt, *draft[:i]]) for i in range(3)])
    p = distribution(logits, [Row(sampling, 0)] * 3)
    rows = [row for seed in range(num) for row in rows_along(Row(sampling, seed, 0), draft)]
    sampled = sample(logits.repeat(num, 1), rows).tokens.view(num, 3).tolist()
    new = [accepted(draft, s) for s in sampled]
    expected_first = (p[0] * num).tolist()
    check([n[0] for n in new], expected_first)
    seconds = [n[1] for n in new if n[0] == first]
    assert all(len(n) == 1 for n in new if n[0] != first)
    check(seconds, (p[1] * len(seconds)).tolist())
    thirds = [n[2] for n in new if n[:2] == draft]
    check(thirds, (p[2] * len(thirds)).tolist())


def check(tokens: list[int], expected: list[float]) -> None:
    counts = [tokens.count(i) for i in range(V)]
    pairs = [(c, e) for c, e in zip(counts, expected, strict=True) if e > 0]
    assert sum(c for c, _ in pairs) == len(tokens) > 200
    assert chisquare([c for c, _ in pairs], [e for _, e in pairs]).pvalue > 1e-4


def test_rows_along_a_draft_know_what_came_before_each() -> None:
    mask = torch.zeros(1, dtype=torch.int32)
    row = Row(Sampling(presence_penalty=1.0), 5, 2, [9], [1, 2], mask=mask)
    rows = rows_along(row, [3, 4])
    assert [list(r.output) for r in rows] == [[1, 2], [1, 2, 3], [1, 2, 3, 4]]
    assert [r.position for r in rows] == [2, 3, 4]
    assert [r.mask is mask for r in rows] == [True, False, False]
    assert len(rows_along(row, [3, 4], [mask, mask])) == 2  # the grammar stopped the draft
