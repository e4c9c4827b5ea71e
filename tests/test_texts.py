import pytest

from blockscale.errors import UsageError
from blockscale.texts import CALIBRATION, EVALUATION, encode_text, read_text, special_tokens


def test_own_texts_are_halves_that_do_not_overlap() -> None:
    assert CALIBRATION == ("en-calibration", "pt-calibration")
    assert EVALUATION == ("en-evaluation", "pt-evaluation")
    for calibration, evaluation in zip(CALIBRATION, EVALUATION, strict=True):
        first, second = read_text(calibration), read_text(evaluation)
        assert (first.name, second.name) == (calibration, evaluation)
        assert len(first.content) > 10_000
        assert 0.8 < len(first.content) / len(second.content) < 1.25
        paragraphs = set(first.content.split("\n\n"))
        assert not paragraphs & {p for p in second.content.split("\n\n") if len(p) > 40}
        assert second.content[0].strip(), "the second half starts with a paragraph"
    assert "ção" in read_text("pt-calibration").content


def test_a_file(tmp_path) -> None:
    path = tmp_path / "prose.v2.txt"
    path.write_text("Olá,\nmundo.\n", encoding="utf-8")
    assert read_text(path) == read_text(str(path))
    assert (read_text(path).name, read_text(path).content) == ("prose.v2", "Olá,\nmundo.\n")


def test_what_cannot_be_read(tmp_path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file") as error:
        read_text(tmp_path / "none.txt")
    assert "en-calibration" in error.value.hint
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_text(tmp_path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_text("en-training")
    latin = tmp_path / "latin.txt"
    latin.write_bytes("ação".encode("latin-1"))
    with pytest.raises(UsageError, match=r"not UTF-8 \(byte 1\)"):
        read_text(latin)
    latin.write_text(" \n\t\n")
    with pytest.raises(UsageError, match="is empty"):
        read_text(latin)


BOS, EOS = 1, 2


def plain(text: str) -> list[int]:
    return [ord(c) for c in text]


def test_special_tokens_are_found_wherever_a_tokenizer_puts_them() -> None:
    assert special_tokens(plain) == ([], [])
    assert special_tokens(lambda text: [BOS, *plain(text)]) == ([BOS], [])
    assert special_tokens(lambda text: [*plain(text), EOS]) == ([], [EOS])
    assert special_tokens(lambda text: [BOS, *plain(text), EOS]) == ([BOS], [EOS])


def test_a_text_is_encoded_without_what_goes_around_it() -> None:
    assert encode_text("ab", lambda text: [BOS, *plain(text), EOS]) == ([BOS], [97, 98])
    assert encode_text("ab", plain) == ([], [97, 98])
