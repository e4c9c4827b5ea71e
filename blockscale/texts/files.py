"""A text file as characters: UTF-8, UTF-16 and UTF-32 with their mark, or a zip of one such file."""

import codecs
import io
import zipfile
import zlib
from pathlib import Path

from blockscale.errors import UsageError
from blockscale.texts.own import CALIBRATION

MAX_BYTES = 2**30  # of a file, and of what a zip unpacks to; calibration takes less than a thousandth of it
_ZIP_STARTS = (b"PK\x03\x04", b"PK\x05\x06")
# UTF-32's mark begins with UTF-16's, so it is looked for first.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CONTROLS = bytes(set(range(32)) - set(b"\b\t\n\v\f\r\x1b"))
_PROBE_BYTES = 2**16
_BINARY_HINT = "give plain text, JSON lines, or a zip of one such file"


def read_file(path: Path) -> tuple[str, str]:
    """(suffix, content): the suffix (".txt", ".jsonl" ...) in lower case, of the file inside where `path` is a zip.

    Line ends become "\\n". UsageError for what is missing, empty, too large, binary or in another encoding.
    """
    suffix, data = path.suffix, _read(path)
    if data.startswith(_ZIP_STARTS):
        suffix, data = _unzip(path, data)
    content = _decode(path, data)
    if not content.strip():
        raise UsageError(f"text {path} is empty", hint="give a text of some pages")
    return suffix.lower(), content.replace("\r\n", "\n").replace("\r", "\n")


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as e:  # ValueError: a name that no file can have
        raise UsageError(
            f"text {path} cannot be read: {e.strerror if isinstance(e, OSError) else e}",
            hint=f"give a text file, or one of {', '.join(CALIBRATION)}",
        ) from e
    _check_size(path, len(data))
    return data


def _check_size(path: Path, num_bytes: int) -> None:
    if num_bytes > MAX_BYTES:
        raise UsageError(f"text {path} is larger than {MAX_BYTES >> 20} MiB", hint="give a part of it: a few MB do")


def _unzip(path: Path, data: bytes) -> tuple[str, bytes]:
    """(suffix, bytes) of the only file in a zip, unpacked in memory, and no more than MAX_BYTES of it."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [m for m in archive.infolist() if not m.filename.endswith("/") and "__MACOSX/" not in m.filename]
            if len(members) != 1:
                raise UsageError(f"zip {path} holds {len(members)} files", hint="only a zip of one text file is read")
            (member,) = members
            if member.flag_bits & 1:
                raise UsageError(f"zip {path} is encrypted", hint="unpack it first")
            # the others unpack a whole chunk at once, however much comes of it
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise UsageError(f"zip {path} is packed with a method other than deflate", hint="unpack it first")
            _check_size(path, member.file_size)
            with archive.open(member) as file:
                unpacked = file.read(MAX_BYTES + 1)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError) as e:
        raise UsageError(f"zip {path} is damaged: {e}", hint="fetch it again, or unpack it first") from e
    _check_size(path, len(unpacked))
    return Path(member.filename).suffix, unpacked


def _decode(path: Path, data: bytes) -> str:
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")
    try:
        content = data.decode(encoding)
    except UnicodeDecodeError as e:
        if encoding == "utf-8" and _looks_binary(data):
            raise _binary(path) from e
        name = encoding.removesuffix("-sig").upper()
        raise UsageError(
            f"text {path} is not {name} (byte {e.start})",
            hint=f"convert it; from Latin-1: iconv -f LATIN1 -t UTF-8 {path} > utf8.txt"
            if name == "UTF-8"
            else f"it begins with the mark of {name} and is cut short or damaged",
        ) from e
    if "\0" in content:
        raise _binary(path)
    return content


def _looks_binary(data: bytes) -> bool:
    """Whether one byte in a hundred of the beginning is a control character, or any is 0."""
    probe = data[:_PROBE_BYTES]
    return b"\0" in probe or (len(probe) - len(probe.translate(None, _CONTROLS))) * 100 > len(probe)


def _binary(path: Path) -> UsageError:
    return UsageError(f"text {path} is binary", hint=_BINARY_HINT)
