"""Proposals from the request's own tokens: what followed the last time that the text went like this.

Source: Saxena, "Prompt lookup decoding", 2023. A proposal costs no model; the model reads all proposed tokens in one
pass, and those it would have chosen itself are kept.

The engine calls, for a decoding request:

    draft = index.propose(num)                      d <= num tokens
    rows = rows_along(row, draft, masks)            d + 1 rows: the logits after the last token and after each proposed
    new = accepted(draft, sample(logits, rows).tokens.tolist())
    index.extend(new)

Every row draws by its own seed and place, as it would have without a draft. So the output is the same token for token,
greedy or sampled, where the logits are the same; and its distribution is the model's in any case: a proposed token is
kept with the model's probability for it, and when it is not, what is drawn has the distribution of the others.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from blockscale.engine.sampler import Row


class NgramIndex:
    """Where each run of `smallest` to `largest` tokens of a growing text was seen last.

    `extend` takes time in proportion to what is new, `propose` to what it proposes; neither depends on the length of
    the text.
    """

    def __init__(self, tokens: Sequence[int] = (), smallest: int = 2, largest: int = 4) -> None:
        self._sizes = range(largest, smallest - 1, -1)
        self._tokens: list[int] = []
        self._next_at: dict[tuple[int, ...], int] = {}  # run -> place of the token after it
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends what was added to the text."""
        for token in tokens:
            end = len(self._tokens)  # runs that end here have a token after them from now on
            for size in self._sizes:
                if size <= end:
                    self._next_at[tuple(self._tokens[end - size :])] = end
            self._tokens.append(token)

    def propose(self, num: int) -> list[int]:
        """Up to `num` tokens that may come next; the longest run that was seen before decides. [] where none was."""
        end = len(self._tokens)
        for size in self._sizes:
            at = self._next_at.get(tuple(self._tokens[end - size :])) if size <= end else None
            if at is not None:
                return self._copied(at, num)
        return []

    def _copied(self, at: int, num: int) -> list[int]:
        """A copy that reaches the end of the text goes on with what it copied: a text that repeats itself may go on
        repeating itself."""
        period = len(self._tokens) - at
        return [self._tokens[at + i % period] for i in range(num)]


def rows_along(row: Row, draft: Sequence[int], masks: Sequence[Tensor | None] | None = None) -> list[Row]:
    """The sampler's rows for a draft: at its first token, after each of them.

    masks  one a row, as `structure.Structure.masks_along` gives them
    """
    if masks is None:
        masks = [row.mask, *[None] * len(draft)]
    reads_output = row.sampling.has_penalties
    return [
        replace(
            row,
            position=row.position + i,
            output=[*row.output, *draft[:i]] if reads_output else row.output,
            mask=mask,
        )
        for i, mask in enumerate(masks)
    ]


def accepted(draft: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The new tokens: the draft as far as the model chose the same, and the model's own choice after it.

    sampled  one token more than the draft has: chosen at its first token, after each of them
    """
    num = next((i for i, token in enumerate(draft) if token != sampled[i]), len(draft))
    return list(sampled[: num + 1])
