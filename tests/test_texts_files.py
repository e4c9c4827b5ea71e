"""Text files in every encoding, and what is refused: bytes written here."""

import codecs
import zipfile
from pathlib import Path

import pytest

from blockscale.errors import UsageError
from blockscale.texts import files, read_text

PROSE = "Olá, mundo.\n" * 40


@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        (b"", "utf-8"),
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
        (codecs.BOM_UTF32_BE, "utf-32-be"),
    ],
)
def test_encodings_with_their_mark(mark: bytes, encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "prose.txt"
    path.write_bytes(mark + PROSE.replace("\n", "\r\n").encode(encoding))
    assert read_text(path).content == PROSE


def refused(path: Path, data: bytes) -> UsageError:
    path.write_bytes(data)
    with pytest.raises(UsageError) as error:
        read_text(path)
    assert error.value.hint
    return error.value


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"),
        (codecs.BOM_UTF8, "is empty"),
        (b" \n\t", "is empty"),
        (PROSE.encode("latin-1"), r"is not UTF-8 (byte 2)"),
        (codecs.BOM_UTF16_LE + b"abc", "is not UTF-16 (byte 4)"),
        (codecs.BOM_UTF16_LE + b"\x00\xd8a\x00", "is not UTF-16 (byte 2)"),
        (PROSE.encode("utf-16-le"), "is binary"),
        (b"text\0text", "is binary"),
        (b"\x1f\x8b\x08\x00" + bytes(range(256)), "is binary"),
        (b"%PDF-1.7\n\x80\x81" + bytes(range(1, 32)), "is binary"),
    ],
)
def test_what_is_no_text(data: bytes, why: str, tmp_path: Path) -> None:
    assert why in str(refused(tmp_path / "x.txt", data))


def test_latin_1_comes_with_its_remedy(tmp_path: Path) -> None:
    assert f"iconv -f LATIN1 -t UTF-8 {tmp_path}/x.txt" in refused(tmp_path / "x.txt", PROSE.encode("latin-1")).hint


def test_a_name_that_no_file_can_have() -> None:
    for name in ("a\0b", "x" * 5000):
        with pytest.raises(UsageError, match="cannot be read"):
            read_text(name)


def zipped(path: Path, method: int = zipfile.ZIP_DEFLATED, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name.replace("__", "."), data)
    return path


def test_a_zip_of_one_text(tmp_path: Path) -> None:
    text = read_text(zipped(tmp_path / "book.zip", inner__txt=PROSE.encode()))
    assert (text.name, text.content) == ("book", PROSE)
    rows = read_text(zipped(tmp_path / "rows.zip", inner__jsonl=b'{"text": "one"}\n{"text": "two"}'))
    assert rows.content == "one\n\ntwo\n\n"
    with zipfile.ZipFile(tmp_path / "mac.zip", "w") as archive:
        archive.writestr("folder/", b"")
        archive.writestr("folder/a.txt", PROSE)
        archive.writestr("__MACOSX/folder/._a.txt", b"\0\5")
    assert read_text(tmp_path / "mac.zip").content == PROSE


def test_zips_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.zip"
    assert "holds 2 files" in str(refused(path, zipped(path, a__txt=b"a", b__txt=b"b").read_bytes()))
    assert "holds 0 files" in str(refused(path, zipped(path).read_bytes()))
    assert "other than deflate" in str(refused(path, zipped(path, zipfile.ZIP_BZIP2, a__txt=b"a").read_bytes()))
    whole = zipped(path, a__txt=PROSE.encode()).read_bytes()
    assert "is damaged" in str(refused(path, whole[: len(whole) // 2]))
    locked = bytearray(whole)
    for start, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        locked[locked.index(start) + offset] |= 1
    assert "is encrypted" in str(refused(path, bytes(locked)))
    wrong_sum = bytearray(whole)
    wrong_sum[wrong_sum.index(b"PK\1\2") + 16] ^= 1
    assert "is damaged" in str(refused(path, bytes(wrong_sum)))
    monkeypatch.setattr(files, "MAX_BYTES", 2**20)
    bomb = zipped(path, a__txt=b" " * (2**20 + 1)).read_bytes()
    assert len(bomb) < 2**12
    assert "is larger than 1 MiB" in str(refused(path, bomb))
    assert "is larger than 1 MiB" in str(refused(tmp_path / "x.txt", b"a" * (2**20 + 1)))


def test_a_zip_that_lies_about_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more is unpacked than it says, whatever is in it."""
    path = zipped(tmp_path / "x.zip", a__txt=b"a" * 2**22)
    data = bytearray(path.read_bytes())
    for start, offset in ((b"PK\3\4", 22), (b"PK\1\2", 24)):
        at = data.index(start) + offset
        data[at : at + 4] = (100).to_bytes(4, "little")
    monkeypatch.setattr(files, "MAX_BYTES", 2**20)
    assert "is damaged" in str(refused(path, bytes(data)))
