"""Text that grows token by token, held against the tokenizers' own decoding. Needs nothing."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from blockscale.engine.detokenizer import Detokenizer, first_stop, num_held
from blockscale.engine.sampling import Sampling
from blockscale.engine.vocabulary import Vocabulary, read_vocabulary
from blockscale.errors import ModelError

from . import tokenizers

BYTES = tokenizers.byte_level()
BYTE_VOCABULARY = read_vocabulary(BYTES)
PLAIN = Vocabulary(tuple(bytes([i]) for i in range(256)), frozenset())


def texts_of(vocabulary: Vocabulary, tokens: list[int], sampling: Sampling | None = None) -> list[str]:
    """What comes out at each token and at the end."""
    detokenizer = Detokenizer(vocabulary, sampling or Sampling())
    return [*[detokenizer.push(token) for token in tokens], detokenizer.finish()]


@pytest.mark.parametrize("text", [*tokenizers.TEXTS, "🙂🙂 é\u0301 \ufffd ok", " x  y", "한국어\n\n"])
@pytest.mark.parametrize("make", [tokenizers.byte_level, tokenizers.byte_fallback])
def test_the_text_is_the_tokenizers(make: Any, text: str) -> None:
    tokenizer = make()
    tokens = tokenizer.backend_tokenizer.encode(
        text.replace(" ", "▁") if make is tokenizers.byte_fallback else text
    ).ids
    parts = texts_of(read_vocabulary(tokenizer), tokens)
    assert "".join(parts) == text
    assert "".join(parts) == tokenizer.decode(tokens)
    # a character comes out with its last byte, no later
    assert not parts[-1]


def test_half_a_character_waits_for_the_rest() -> None:
    tokens = list("a🙂é".encode())
    assert texts_of(PLAIN, tokens) == ["a", "", "", "", "🙂", "", "é", ""]
    assert texts_of(PLAIN, tokens[:3]) == ["a", "", "", ""]  # the end came too soon


def test_bytes_that_are_no_text_become_a_sign_and_hold_up_nothing() -> None:
    assert texts_of(PLAIN, [0x80, *b"a", 0xF0, *b"b"]) == ["\ufffd", "a", "", "\ufffdb", ""]


@given(st.lists(st.integers(0, 255), max_size=30))
@settings(max_examples=100, deadline=None)
def test_any_bytes_give_the_text_of_the_whole(tokens: list[int]) -> None:
    whole = bytes(tokens).decode("utf-8", "replace")
    text = "".join(texts_of(PLAIN, tokens))
    # half a character at the end is left out; of half a surrogate the whole makes a sign for each of its two bytes
    assert whole.startswith(text)
    assert whole[len(text) :] in ("", "\ufffd", "\ufffd\ufffd")


@pytest.mark.parametrize(
    ("make", "tokens", "text"),
    [
        (tokenizers.metaspace, [1, 0, 2], " bits Fours"),
        (tokenizers.words, [0, 1, 2], "Four bits ."),
        (tokenizers.characters, [*b"a b"], "a b"),
    ],
)
def test_spaces_are_where_the_prompt_needs_them(make: Any, tokens: list[int], text: str) -> None:
    assert "".join(texts_of(read_vocabulary(make()), tokens)) == text


def test_special_tokens_leave_no_text_unless_asked_for() -> None:
    end, think = BYTES.convert_tokens_to_ids(["<|end|>", "<think>"])
    tokens = [think, *BYTES.encode("bits"), end]
    assert "".join(texts_of(BYTE_VOCABULARY, tokens)) == "<think>bits"
    shown = texts_of(BYTE_VOCABULARY, tokens, Sampling(skip_special_tokens=False))
    assert "".join(shown) == "<think>bits<|end|>"


def test_tokens_past_the_tokenizers_end_leave_no_text() -> None:
    assert texts_of(BYTE_VOCABULARY, [100_000]) == ["", ""]


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    other = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    other.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        read_vocabulary(PreTrainedTokenizerFast(tokenizer_object=other))
    with pytest.raises(ModelError, match="object: its tokens' bytes"):
        read_vocabulary(object())


def test_text_waits_while_it_may_become_a_stop_string() -> None:
    stopping = Sampling(stop=("END", "\n\n"))
    assert texts_of(PLAIN, [*b"aENd\nb"], stopping) == ["a", "", "", "ENd", "", "\nb", ""]
    assert texts_of(PLAIN, [*b"aEN"], stopping) == ["a", "", "", "EN"]
    detokenizer = Detokenizer(PLAIN, stopping)
    assert [detokenizer.push(t) for t in b"aEENDx"] == ["a", "", "E", "", "", ""]
    assert detokenizer.stopped_by == "END"
    assert detokenizer.finish() == ""


def test_a_stop_string_across_and_inside_tokens() -> None:
    vocabulary = Vocabulary((b"one EN", b"D two", b"a STOP b"), frozenset())
    detokenizer = Detokenizer(vocabulary, Sampling(stop=("END", "STOP")))
    assert detokenizer.push(0) == "one "
    assert detokenizer.push(1) == ""
    assert detokenizer.stopped_by == "END"
    detokenizer = Detokenizer(vocabulary, Sampling(stop=("END", "STOP")))
    assert detokenizer.push(2) == "a "
    assert detokenizer.stopped_by == "STOP"


def test_no_stop_string_counts_before_min_tokens() -> None:
    detokenizer = Detokenizer(PLAIN, Sampling(stop=("b",), min_tokens=3))
    assert "".join(detokenizer.push(t) for t in b"abab") == "aba"
    assert detokenizer.stopped_by == "b"


@given(
    text=st.text("abc", max_size=24),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.sets(st.integers(1, 23)),
)
@settings(max_examples=200, deadline=None)
def test_where_text_is_cut_into_tokens_does_not_show(text: str, stops: list[str], cuts: set[int]) -> None:
    edges = [0, *sorted(c for c in cuts if c < len(text)), len(text)]
    pieces = [text[a:b].encode() for a, b in pairwise(edges)]
    sampling = Sampling(stop=tuple(stops))

    def outcome(pieces: list[bytes]) -> tuple[str, str | None]:
        detokenizer = Detokenizer(Vocabulary(tuple(pieces), frozenset()), sampling)
        out = "".join(detokenizer.push(i) for i in range(len(pieces)))
        return out + detokenizer.finish(), detokenizer.stopped_by

    found, stopped_by = outcome(pieces)
    assert (found, stopped_by) == outcome([c.encode() for c in text])
    # the first prefix that ends with a stop string ends the text
    ends = [i for i in range(len(text) + 1) if any(text[:i].endswith(s) for s in stops)]
    if ends:
        longest = max((s for s in stops if text[: ends[0]].endswith(s)), key=len)
        assert (found, stopped_by) == (text[: ends[0] - len(longest)], longest)
    else:
        assert (found, stopped_by) == (text, None)


def test_the_pieces_of_it() -> None:
    assert first_stop("xabab", ("bab", "ab")) == (1, "ab")
    assert first_stop("xabc", ("bc", "abc")) == (1, "abc")
    assert first_stop("x", ()) is None
    assert num_held("xaab", ("aabc", "b!")) == 3
    assert num_held("xb", ("aabc",)) == 0
    assert num_held("abc", ("abc",)) == 0
