"""Tokenizers as llama.cpp's metadata: names of splitters, tokens and their types, scores, special tokens."""

import heapq
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import TokenType

from blockscale.conversion.gguf.vocabulary import Vocabulary, read_vocabulary
from blockscale.errors import CheckpointError
from tests.conversion.gguf_models import (
    BOS,
    EOS,
    LLAMA3_SPLIT,
    QWEN2_SPLIT,
    TEMPLATE,
    TOOL,
    add_byte_level_tokenizer,
    add_sentencepiece_tokenizer,
    byte_alphabet,
    byte_level,
    byte_level_vocabulary,
    sentencepiece_vocabulary,
    split_by,
)

NUM_TOKENS = 400
DIGITS_THEN_GPT2 = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level(use_regex=True)],
}
O200K_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def config(**fields: Any) -> Any:
    return SimpleNamespace(**{"eos_token_id": None, "bos_token_id": None, **fields})


def make_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    return tmp_path


def edit(folder: Path, file: str, change: Any) -> None:
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))


def read(folder: Path, **fields: Any) -> Vocabulary:
    return read_vocabulary(folder, config(**fields), NUM_TOKENS)


@pytest.mark.parametrize(
    ("pre_tokenizer", "ignore_merges", "name"),
    [
        (byte_level(use_regex=True), False, "gpt-2"),
        (DIGITS_THEN_GPT2, False, "smollm"),
        (split_by(LLAMA3_SPLIT), True, "llama-bpe"),
        (split_by(LLAMA3_SPLIT), False, "dbrx"),
        (split_by(LLAMA3_SPLIT.replace("\\r\\n", "\r\n")), True, "llama-bpe"),
        (split_by(QWEN2_SPLIT), False, "qwen2"),
        (split_by(O200K_SPLIT), True, "gpt-4o"),
        (split_by(O200K_SPLIT), False, "gpt-4o"),
        (split_by(TEKKEN_SPLIT), True, "tekken"),
    ],
)
def test_a_splitter_is_found_by_its_expressions(
    tmp_path: Path, pre_tokenizer: dict[str, Any], ignore_merges: bool, name: str
) -> None:
    folder = add_byte_level_tokenizer(make_folder(tmp_path), pre_tokenizer, ignore_merges=ignore_merges)
    vocabulary = read(folder)
    assert (vocabulary.kind, vocabulary.pre) == ("gpt2", name)


@pytest.mark.parametrize(
    ("pre_tokenizer", "ignore_merges"),
    [
        (split_by(LLAMA3_SPLIT.replace("{1,3}", "{1,2}")), True),
        (split_by(QWEN2_SPLIT), True),
        ({"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, byte_level(use_regex=True)]}, False),
        ({**byte_level(use_regex=True), "add_prefix_space": True}, False),
        ({"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": False}]}, False),
    ],
)
def test_an_unknown_splitter_is_refused(tmp_path: Path, pre_tokenizer: dict[str, Any], ignore_merges: bool) -> None:
    folder = add_byte_level_tokenizer(make_folder(tmp_path), pre_tokenizer, ignore_merges=ignore_merges)
    with pytest.raises(CheckpointError, match=r"tokenizer: pre-tokenizer .* none that is known") as caught:
        read(folder)
    assert "qwen2" in caught.value.hint


def test_a_normalizer_that_llama_cpp_lacks_is_refused(tmp_path: Path) -> None:
    folder = add_byte_level_tokenizer(make_folder(tmp_path))
    edit(folder, "tokenizer.json", lambda t: t.update(normalizer={"type": "Lowercase"}))
    with pytest.raises(CheckpointError, match="normalizer Lowercase"):
        read(folder)
    edit(folder, "tokenizer.json", lambda t: t.update(normalizer={"type": "NFC"}))
    assert read(folder).pre == "gpt-2"


def test_tokens_lie_at_their_ids_with_their_types(tmp_path: Path) -> None:
    vocabulary = read(add_byte_level_tokenizer(make_folder(tmp_path)))
    tokens, merges = byte_level_vocabulary()
    assert list(vocabulary.tokens[: len(tokens)]) == list(tokens)
    assert vocabulary.tokens[: len(tokens)][32] == byte_alphabet()[32] == "\u0120"
    assert list(vocabulary.merges) == [f"{left} {right}" for left, right in merges]
    n = len(tokens)
    assert list(vocabulary.tokens[n : n + 4]) == [BOS, EOS, TOOL, f"[PAD{n + 3}]"]
    assert [*vocabulary.types[n - 1 : n + 4]] == [
        TokenType.NORMAL,
        TokenType.CONTROL,
        TokenType.CONTROL,
        TokenType.USER_DEFINED,
        TokenType.UNUSED,
    ]
    assert len(vocabulary.tokens) == len(vocabulary.types) == NUM_TOKENS
    assert vocabulary.scores == []


@pytest.mark.parametrize("has_bos", [True, False])
def test_the_tokens_around_a_text_are_those_that_the_tokenizer_adds(tmp_path: Path, has_bos: bool) -> None:
    vocabulary = read(add_byte_level_tokenizer(make_folder(tmp_path), has_bos=has_bos))
    assert (vocabulary.has_bos, vocabulary.has_eos) == (has_bos, False)
    assert vocabulary.tokens[vocabulary.specials["bos"]] == BOS
    assert vocabulary.tokens[vocabulary.specials["eos"]] == EOS
    assert vocabulary.chat_template == TEMPLATE


def test_other_tokens_around_a_text_are_refused(tmp_path: Path) -> None:
    folder = add_byte_level_tokenizer(make_folder(tmp_path), has_bos=True)
    edit(folder, "tokenizer_config.json", lambda t: t.update(bos_token=EOS))
    with pytest.raises(CheckpointError, match=r"puts \[264\] before"):
        read(folder)


def test_ends_come_from_the_tokenizer_then_the_configs(tmp_path: Path) -> None:
    folder = add_byte_level_tokenizer(make_folder(tmp_path))
    own = read(folder).specials["eos"]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [own, 7, 9]}))
    assert read(folder).specials["eot"] == 7
    edit(folder, "tokenizer_config.json", lambda t: t.pop("eos_token"))
    (folder / "generation_config.json").unlink()
    assert read(folder, eos_token_id=[12, 13]).specials == {"bos": own - 1, "eos": 12, "eot": 13}
    with pytest.raises(CheckpointError, match="no end-of-sequence token"):
        read(folder)


def test_without_a_first_token_none_is_made_up(tmp_path: Path) -> None:
    """llama.cpp would take token 11."""
    folder = add_byte_level_tokenizer(make_folder(tmp_path))
    edit(folder, "tokenizer_config.json", lambda t: t.pop("bos_token"))
    vocabulary = read(folder)
    assert vocabulary.specials["bos"] == vocabulary.specials["eos"]
    assert not vocabulary.has_bos
    assert read(folder, bos_token_id=5).specials["bos"] == 5


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    folder = add_byte_level_tokenizer(make_folder(tmp_path))
    with pytest.raises(CheckpointError, match=r"gives token 266, the model knows 200"):
        read_vocabulary(folder, config(), 200)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer") as caught:
        read(make_folder(tmp_path))
    assert "tokenizer.json" in caught.value.hint


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = add_byte_level_tokenizer(make_folder(tmp_path))
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    edit(folder, "tokenizer.json", lambda t: t.update(model=model, added_tokens=[], post_processor=None))
    with pytest.raises(CheckpointError, match="WordLevel"):
        read(folder)


def test_tokens_that_would_be_twice_in_the_file_are_refused(tmp_path: Path) -> None:
    folder = add_byte_level_tokenizer(make_folder(tmp_path))
    edit(folder, "tokenizer.json", lambda t: t["model"]["vocab"].update({"[PAD300]": 270}))
    with pytest.raises(CheckpointError, match=r"'\[PAD300\]' twice"):
        read(folder)


def merge_by_scores(text: str, vocabulary: Vocabulary) -> list[int]:
    """llama.cpp's SentencePiece: the pair of neighbours whose token has the highest score is merged, leftmost first."""
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    parts = list(text.replace(" ", "\u2581"))
    while True:
        pairs = [
            (-vocabulary.scores[ids[a + b]], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ids
        ]
        if not pairs:
            break
        _, i = heapq.nsmallest(1, pairs)[0]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [i for part in parts for i in ([ids[part]] if part in ids else [ids[f"<0x{b:02X}>"] for b in part.encode()])]


@pytest.mark.parametrize("text", ["the and in", "then an inn 12 \u00e9", "x  the", "athe", ""])
def test_merging_by_scores_is_what_the_tokenizer_does(tmp_path: Path, text: str) -> None:
    from transformers import AutoTokenizer

    folder = add_sentencepiece_tokenizer(make_folder(tmp_path), has_prefix=False)
    vocabulary = read(folder)
    assert merge_by_scores(text, vocabulary) == AutoTokenizer.from_pretrained(folder).encode(text)[1:]


def test_sentencepiece_tokens_have_their_types(tmp_path: Path) -> None:
    vocabulary = read(add_sentencepiece_tokenizer(make_folder(tmp_path)))
    tokens, _ = sentencepiece_vocabulary()
    assert (vocabulary.kind, vocabulary.pre, vocabulary.merges) == ("llama", "default", [])
    assert [*vocabulary.types[:4]] == [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, TokenType.BYTE]
    assert vocabulary.types[tokens["\u2581the"]] == TokenType.NORMAL
    assert vocabulary.types[len(tokens)] == TokenType.USER_DEFINED
    assert len(vocabulary.scores) == NUM_TOKENS
    assert vocabulary.specials == {"bos": 1, "eos": 2, "unk": 0}
    assert vocabulary.has_bos


def test_a_later_merge_of_an_earlier_piece_has_no_score(tmp_path: Path) -> None:
    _, merges = sentencepiece_vocabulary()
    moved = [merges[1], *merges[2:], merges[0]]  # "th" is now made after "the", of which it is a part: still in order
    folder = add_sentencepiece_tokenizer(make_folder(tmp_path), moved)
    assert read(folder).kind == "llama"
    twice = [m for m in merges if "".join(m) == "the"]
    assert len(twice) == 2
    apart = [twice[0], *(m for m in merges if m not in twice), twice[1]]
    folder = add_sentencepiece_tokenizer(folder, apart)
    with pytest.raises(CheckpointError, match="not SentencePiece's: merge"):
        read(folder)


def test_neighbours_that_only_scores_would_merge_are_found(tmp_path: Path) -> None:
    _, merges = sentencepiece_vocabulary()
    folder = add_sentencepiece_tokenizer(make_folder(tmp_path), [m for m in merges if m != ("t", "he")])
    with pytest.raises(CheckpointError, match="'t' \\+ 'he' form a token and have no merge"):
        read(folder)


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "prefix"),
    [
        (None, {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}, True),
        (None, {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never", "split": False}, False),
        ({"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}, None, False),
    ],
)
def test_a_space_goes_in_front_as_the_tokenizer_has_it(
    tmp_path: Path, normalizer: Any, pre_tokenizer: Any, prefix: bool
) -> None:
    folder = add_sentencepiece_tokenizer(make_folder(tmp_path))
    edit(folder, "tokenizer.json", lambda t: t.update(normalizer=normalizer, pre_tokenizer=pre_tokenizer))
    vocabulary = read(folder)
    assert vocabulary.has_space_prefix is prefix
    assert bool(vocabulary.notices) == (pre_tokenizer is not None and prefix)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFKC"}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": True}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
    ],
)
def test_what_sentencepiece_of_llama_cpp_cannot_do_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = add_sentencepiece_tokenizer(make_folder(tmp_path))
    edit(folder, "tokenizer.json", lambda t: t.update(change))
    with pytest.raises(CheckpointError, match=r"llama\.cpp has no"):
        read(folder)


def test_llama_cpp_is_not_led_astray_by_the_name_phi_3(tmp_path: Path) -> None:
    """It looks for tokens of Phi-3 in any model that is called so, and fails without them."""
    folder = add_sentencepiece_tokenizer(make_folder(tmp_path))
    plain = read(folder)
    assert plain.model_name("my-Phi-3-mini") == "my-phi 3-mini"
    assert plain.model_name("llama") == "llama"

    def add_end(content: dict[str, Any]) -> None:
        content["added_tokens"].append({**content["added_tokens"][0], "id": 370, "content": "<|endoftext|>"})
        content["added_tokens"][-1]["rstrip"] = True

    edit(folder, "tokenizer.json", add_end)
    phi = read(folder)
    assert phi.model_name("my-Phi-3-mini") == "my-Phi-3-mini"
    assert phi.model_name("model") == "model (phi-3)"


def test_named_templates_are_all_written(tmp_path: Path) -> None:
    import gguf

    from blockscale.conversion.gguf.vocabulary import add_vocabulary

    folder = add_byte_level_tokenizer(make_folder(tmp_path))
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    edit(folder, "tokenizer_config.json", lambda t: t.update(chat_template=named))
    writer = gguf.GGUFWriter(None, "llama")
    add_vocabulary(writer, read(folder))
    found = {key: value.value for key, value in writer.kv_data[0].items()}
    assert found["tokenizer.chat_template"] == "A"
    assert found["tokenizer.chat_template.tool_use"] == "B"
