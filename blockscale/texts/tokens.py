"""What a tokenizer makes of a text, apart from what it puts around every text."""

from collections.abc import Callable, Sequence


def special_tokens(encode: Callable[[str], Sequence[int]]) -> tuple[list[int], list[int]]:
    """The tokens that `encode` puts before and after every text: ([BOS], []), ([], [EOS]), ([], []) ..."""
    added, probe = list(encode("")), list(encode("a"))
    num_before = 0
    while num_before < min(len(added), len(probe)) and added[num_before] == probe[num_before]:
        num_before += 1
    return added[:num_before], added[num_before:]


def encode_text(text: str, encode: Callable[[str], Sequence[int]]) -> tuple[list[int], list[int]]:
    """What a window of this tokenizer starts with (BOS, or nothing), and the text's own tokens, nothing around them."""
    before, after = special_tokens(encode)
    encoded = list(encode(text))
    return before, encoded[len(before) : len(encoded) - len(after)]
