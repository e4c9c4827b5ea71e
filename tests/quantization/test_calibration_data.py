"""Which windows are taken of which text, and what is said where a text cannot give its share."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockscale.errors import UsageError
from blockscale.quantization.calibration_data import (
    WINDOW,
    CalibrationData,
    fitting_window,
    read_calibration,
    share_out,
    tokenize,
)
from blockscale.texts import Text
from blockscale.texts.short_words import short_words, stored_short_words


def characters(text: str) -> list[int]:
    return [ord(c) for c in text]


def test_windows_come_from_every_text_in_equal_shares() -> None:
    texts = [Text("a", "a" * 1000), Text("b", "b" * 95), Text("c", "c" * 500)]
    data = tokenize(texts, characters, max_tokens=120, window=10)
    assert data.windows.shape == (12, 10)
    assert data.num_tokens == 120
    assert data.windows[:, 0].tolist() == [97] * 4 + [98] * 4 + [99] * 4


def test_windows_are_spread_through_a_text() -> None:
    text = "".join(chr(i) for i in range(100))
    data = tokenize([Text("a", text)], characters, max_tokens=30, window=10)
    assert data.windows[:, 0].tolist() == [0, 30, 60]
    all_of_it = tokenize([Text("a", text)], characters, max_tokens=10_000, window=10)
    assert all_of_it.windows.flatten().tolist() == list(range(100))


def test_the_digest_follows_the_tokens() -> None:
    first = tokenize([Text("a", "x" * 40)], characters, window=10)
    assert first.digest == tokenize([Text("other name", "x" * 40)], characters, window=10).digest
    assert first.digest != tokenize([Text("a", "y" * 40)], characters, window=10).digest
    assert first.digest != tokenize([Text("a", "x" * 40)], characters, max_tokens=20, window=10).digest


def test_a_text_shorter_than_a_window_makes_the_window() -> None:
    assert tokenize([Text("a", "x" * 100)], characters).windows.shape == (1, 100)


def test_every_window_starts_as_the_tokenizer_starts_a_text() -> None:
    data = tokenize([Text("a", "x" * 40)], lambda text: [1, *characters(text)], window=11)
    assert data.windows.shape == (4, 11)
    assert data.windows[:, 0].tolist() == [1] * 4
    assert (data.windows[:, 1:] == ord("x")).all()


@pytest.mark.parametrize("contents", [["x" * 511, "y" * 512], ["x" * 7], [""]])
def test_text_that_is_too_short(contents: list[str]) -> None:
    texts = [Text(f"text{i}", content) for i, content in enumerate(contents)]
    with pytest.raises(UsageError, match=r"text0 has .* shorter than one window") as error:
        tokenize(texts, characters)
    assert error.value.hint


def test_windows_come_in_the_shares_that_are_asked_for() -> None:
    texts = [Text("a", "a" * 1000), Text("b", "b" * 1000), Text("c", "c" * 1000)]
    data = tokenize(texts, characters, max_tokens=100, window=10, shares=[0.7, 0.2, 0.1])
    assert data.windows[:, 0].tolist() == [97] * 7 + [98] * 2 + [99]
    assert [(t.name, t.num_tokens) for t in data.texts] == [("a", 70), ("b", 20), ("c", 10)]
    assert data.notices == ()


def test_what_a_short_text_leaves_goes_to_the_others() -> None:
    texts = [Text("a", "a" * 1000), Text("b", "b" * 1000), Text("c", "c" * 25)]
    data = tokenize(texts, characters, max_tokens=200, window=10, shares=[0.2, 0.4, 0.4])
    assert data.windows[:, 0].tolist() == [97] * 6 + [98] * 12 + [99] * 2
    assert data.notices == ("calibration text c has 2 windows: all are taken, 10 % of the calibration instead of 40 %",)
    alone = tokenize([Text("a", "a" * 100)], characters, window=10)
    assert alone.num_tokens == 100
    assert alone.notices == ()


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 99)), min_size=1, max_size=6),
    st.integers(1, 1000),
)
def test_shares_are_kept_where_they_can_be(texts: list[tuple[int, int]], total: int) -> None:
    counts, weights = [count for count, _ in texts], [weight for _, weight in texts]
    shares = [weight / sum(weights) for weight in weights]
    taken = share_out(counts, shares, total)
    assert all(1 <= num <= count for num, count in zip(taken, counts, strict=True))
    assert sum(taken) <= max(total, len(texts) + total)
    if all(num < count for num, count in zip(taken, counts, strict=True)):  # nobody is short
        assert taken == [max(1, total * weight // sum(weights)) for weight in weights]
    # whoever is not short lacks less than a window for each text of all that there is
    if any(num < count for num, count in zip(taken, counts, strict=True)):
        assert sum(taken) > total - len(texts)


def test_equal_shares_are_whole_windows() -> None:
    """No window is lost to a rounding error: 49 * (1 / 49) is less than 1."""
    for count in range(1, 200):
        assert share_out([10**6] * count, [1 / count] * count, 3 * count) == [3] * count


def test_seeds_draw_other_windows_and_none_twice() -> None:
    text = Text("a", "".join(chr(i) for i in range(1000)))
    firsts = {}
    for seed in (0, 1, 2, 2**62):
        data = tokenize([text], characters, max_tokens=200, window=10, seed=seed)
        assert torch.equal(data.windows, tokenize([text], characters, 200, 10, seed=seed).windows)
        assert data.seed == seed
        firsts[seed] = data.windows[:, 0].tolist()
        assert len(set(firsts[seed])) == 20
        assert all(first % 10 == 0 for first in firsts[seed])
        assert (data.windows == data.windows[:, :1] + torch.arange(10)).all()
    assert firsts[0] == list(range(0, 1000, 50))
    assert len({tuple(f) for f in firsts.values()}) == 4


def test_a_seed_that_changes_nothing_is_told() -> None:
    texts = [Text("a", "abcdefghij" * 3)]
    data = tokenize(texts, characters, window=10, seed=3)
    assert data.digest == tokenize(texts, characters, window=10).digest
    assert data.notices == ("the texts have no more than 3 windows: all are taken, whatever the seed",)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seeds_that_are_none(seed: int) -> None:
    with pytest.raises(UsageError, match=f"seed {seed} is out of range"):
        tokenize([Text("a", "a" * 100)], characters, seed=seed)


def test_the_record_says_what_was_read() -> None:
    """The words of the windows alone, not those of the rest of the text."""
    text = Text("half", "one two six " * 1000 + "uno dois seis " * 1000)
    data = tokenize([text], characters, max_tokens=1000, window=100)
    assert abs(data.texts[0].words.num_words - 1000 / 4.33) < 25
    head = tokenize([Text("head", "one two six " * 1000)], characters, window=12)
    assert head.texts[0].words == short_words("one two six " * 1000)
    record = json.loads(json.dumps(data.to_dict()))
    assert record["seed"] == 0
    assert [(t["name"], t["num_tokens"]) for t in record["texts"]] == [("half", 1000)]
    stored = stored_short_words(record["texts"][0]["short_words"])
    assert stored is not None
    assert stored.shares == pytest.approx(data.texts[0].words.shares, abs=1e-4)


def fake_tokenizer(chat_template: str | None = None) -> SimpleNamespace:
    def apply_chat_template(messages: Sequence[dict[str, str]], *, tokenize: bool) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)

    return SimpleNamespace(encode=characters, chat_template=chat_template, apply_chat_template=apply_chat_template)


def read(sources: Sequence[object], tokenizer: SimpleNamespace | None = None, **options: int) -> CalibrationData:
    return read_calibration(sources, tokenizer or fake_tokenizer(), {"max_position_embeddings": 10}, **options)  # type: ignore[arg-type]


def test_a_mix_of_files(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 1000)
    data = read([f"{tmp_path}/a.txt:3", (tmp_path / "b.txt", 1)], max_tokens=200)
    assert data.windows.shape == (20, 10)
    assert (data.windows == ord("a")).sum() == 150
    drawn = read([f"{tmp_path}/a.txt"], max_tokens=200, seed=1)
    assert drawn.seed == 1


def test_conversations_go_through_the_template(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
    path.write_text(json.dumps(row) + "\n" + json.dumps({"messages": []}) + "\n")
    data = read([path], fake_tokenizer("a template"))
    assert "".join(map(chr, data.windows.flatten().tolist())) in "<user>hi<assistant>yo"
    assert data.notices == ("text chat: 1 of 2 rows are left out; the first, line 2: the conversation is empty",)
    with pytest.raises(UsageError, match="line 1, messages: a conversation, and the model has no chat template"):
        read([path])


def test_a_window_fits_the_context() -> None:
    assert fitting_window(None, {}) == WINDOW
    assert fitting_window(None, {"max_position_embeddings": 100}, num_before=1) == 99
    assert fitting_window(None, {"text_config": {"max_position_embeddings": 64}}) == 64
    with pytest.raises(UsageError, match="the model's context is 100"):
        fitting_window(101, {"max_position_embeddings": 100})


def test_windows_are_left_for_the_model_to_write(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 1000)
    data = read([f"{tmp_path}/a.txt:0.25", "self:0.75"], max_tokens=200)
    assert data.windows.shape == (5, 10)
    assert data.num_to_write == 15
    assert [(t.name, t.num_tokens) for t in data.texts] == [("a", 50)], "what is written is recorded when it is"
    assert data.notices == ()
    alone = read(["self"], max_tokens=200, seed=4)
    assert (alone.windows.shape, alone.num_to_write, alone.seed) == ((0, 10), 20, 4)
    assert read(["self"], max_tokens=1).num_to_write == 1
    digests = [alone.digest, read(["self"], max_tokens=200).digest, read(["self"], max_tokens=190, seed=4).digest]
    assert len(set(digests)) == 3


def test_what_a_short_text_leaves_the_model_writes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 25)
    data = read(["self:0.5", f"{tmp_path}/a.txt:0.5"], max_tokens=200)
    assert (len(data.windows), data.num_to_write) == (2, 18)
    assert data.notices == ("calibration text a has 2 windows: all are taken, 10 % of the calibration instead of 50 %",)
    (tmp_path / "a.txt").write_text("a" * 9)
    with pytest.raises(UsageError, match="a has 9 tokens: shorter than one window of 10 tokens"):
        read(["self", f"{tmp_path}/a.txt"])


def test_no_text_at_all_is_the_models_own() -> None:
    data = read([], max_tokens=200)
    assert data.num_to_write == 20
    assert data.notices[0].startswith("no calibration text: the model writes its own")
    assert "--calibration FILE" in data.notices[0]


@pytest.mark.parametrize(
    ("sources", "device", "num_tokens"),
    [
        (["self"], "cpu", 16_384),
        (["self"], "cuda", 65_536),
        (["self:0.5", "en-calibration:0.5"], "cpu", 32_768),
        (["self:0.1", "en-calibration:0.9"], "cpu", 65_536),
        (["self:0.5", "en-calibration:0.5"], "cuda", 65_536),
    ],
)
def test_how_much_by_default(sources: list[str], device: str, num_tokens: int) -> None:
    """The most that is written on a CPU bounds the whole, so that the shares stay as they were asked for."""
    config = {"max_position_embeddings": 8}
    data = read_calibration(sources, fake_tokenizer(), config, device=device)
    share = float(sources[0].partition(":")[2] or 1)
    num_own = len(data.windows)
    assert num_own + data.num_to_write == num_tokens // 8
    if num_own < 1000:  # the text is not used up
        assert data.num_to_write == int(share * num_tokens) // 8


def test_a_file_of_that_name_has_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "self").write_text("a" * 100)
    monkeypatch.chdir(tmp_path)
    assert read(["./self"]).num_to_write == 0
    assert read([Path("self")]).num_to_write == 0
    assert read(["self"]).num_to_write > 0
