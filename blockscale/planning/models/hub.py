"""A hub repository as the planner sees it: its config, and the headers of its weights by range requests.

Some hundred kilobytes of each shard are read instead of gigabytes. A folder stands in for the repository while they are
looked at: files of their true size, with a header and holes.
"""

import json
import struct
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from blockscale.checkpoint.shards import INDEX_NAME, SINGLE_NAME
from blockscale.errors import CheckpointError, UsageError
from blockscale.planning.models.architecture import Architecture
from blockscale.planning.models.folder import read_model
from blockscale.planning.models.weights import Weights

_FIRST_BYTES = 256_000  # holds most headers whole
_MAX_HEADER_BYTES = 100_000_000  # the reference implementation's own limit
_MAX_JSON_BYTES = 100_000_000
_AT_ONCE = 8
_CONFIGS = ("hf_quant_config.json",)  # beside config.json, where they exist
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Piece:
    """The first bytes of a file, and how long all of it is."""

    content: bytes
    size: int


Fetch = Callable[[str, int, int], Piece | None]
"""(file name, first byte, number of bytes) -> what lies there; None: no such file."""


def read_hub_model(repository: str, revision: str = "main") -> tuple[Architecture, Weights]:
    """Architecture and exact bytes by part.

    UsageError offline, for an unknown or closed repository, and for one without safetensors.
    """
    return read_remote(repository, _from_hub(repository, revision))


def read_remote(name: str, fetch: Fetch) -> tuple[Architecture, Weights]:
    """The same through any `fetch`."""
    with tempfile.TemporaryDirectory(prefix="blockscale-") as temporary:
        folder = Path(temporary) / PurePosixPath(name).name
        folder.mkdir()
        config = _whole(fetch, "config.json")
        if config is None:
            raise UsageError(f"{name}: no config.json in the repository", hint="this is not a transformers model")
        (folder / "config.json").write_bytes(config)
        for file in _CONFIGS:
            content = _whole(fetch, file)
            if content is not None:
                (folder / file).write_bytes(content)
        index = _whole(fetch, INDEX_NAME)
        if index is not None:
            (folder / INDEX_NAME).write_bytes(index)
        shards = [SINGLE_NAME] if index is None else _shards(name, index)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = list(pool.map(lambda shard: _stand_in(fetch, folder, shard), shards))
        missing = [shard for shard, is_there in zip(shards, found, strict=True) if not is_there]
        if missing:
            raise UsageError(
                f"{name}: no {missing[0]} in the repository", hint="only safetensors can be read from afar"
            )
        try:
            architecture, weights = read_model(folder)
        except CheckpointError as e:
            raise CheckpointError(str(e).replace(str(folder), name), e.hint) from e
        return replace(architecture, name=name), weights


def _shards(name: str, index: bytes) -> list[str]:
    try:
        files = sorted(set(json.loads(index)["weight_map"].values()))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise CheckpointError(f"{name}: {INDEX_NAME} has no weight_map", hint="choose another revision") from e
    outside = [file for file in files if not isinstance(file, str) or PurePosixPath(file).name != file]
    if outside:
        raise CheckpointError(f"{name}: {INDEX_NAME} names {outside[0]!r}", hint="choose another repository")
    return files


def _whole(fetch: Fetch, file: str) -> bytes | None:
    piece = fetch(file, 0, _FIRST_BYTES)
    if piece is None or len(piece.content) >= piece.size:
        return None if piece is None else piece.content
    if piece.size > _MAX_JSON_BYTES:
        raise CheckpointError(f"{file}: {piece.size} bytes are too many for a config", hint="choose another repository")
    rest = fetch(file, len(piece.content), piece.size - len(piece.content))
    return piece.content + (b"" if rest is None else rest.content)


def _stand_in(fetch: Fetch, folder: Path, file: str) -> bool:
    """A file with the header of the remote one and its size. False where there is none."""
    piece = fetch(file, 0, _FIRST_BYTES)
    if piece is None:
        return False
    content = piece.content
    if len(content) >= 8:
        needed = min(8 + struct.unpack("<Q", content[:8])[0], piece.size, _MAX_HEADER_BYTES)
        if needed > len(content):
            rest = fetch(file, len(content), needed - len(content))
            content += b"" if rest is None else rest.content
        content = content[:needed]
    with (folder / file).open("wb") as out:
        out.write(content)
        out.truncate(piece.size)  # holes take no room
    return True


def _from_hub(repository: str, revision: str) -> Fetch:
    """Through the hub's own client, which follows redirects without handing the token on."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
    )
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    if constants.HF_HUB_OFFLINE:
        raise _unreachable(repository, "offline mode is on (HF_HUB_OFFLINE)")
    headers = build_hf_headers()

    def fetch(file: str, first: int, num_bytes: int) -> Piece | None:
        wanted = {**headers, "Range": f"bytes={first}-{first + num_bytes - 1}", "Accept-Encoding": "identity"}
        try:
            url = hf_hub_url(repository, file, revision=revision)
            answer = get_session().get(url, headers=wanted, timeout=_TIMEOUT_S)
            hf_raise_for_status(answer)
        except EntryNotFoundError:
            return None
        except OfflineModeIsEnabled as e:
            raise _unreachable(repository, "offline mode is on") from e
        except (HfHubHTTPError, HFValidationError) as e:
            raise UsageError(
                f"{repository}: no such model on the hub", hint="check the name; gated models need a token"
            ) from e
        except Exception as e:  # the client's own errors differ between its versions, and all mean the same
            raise _unreachable(repository, str(e) or type(e).__name__) from e
        return Piece(answer.content, _size(answer.headers, len(answer.content)))

    return fetch


def _size(headers: Mapping[str, str], num_bytes: int) -> int:
    """Of the whole file: `Content-Range: bytes 0-255999/4976698672`. Without one, all of it was sent."""
    total = headers.get("Content-Range", "").rpartition("/")[2]
    return int(total) if total.isdigit() else num_bytes


def _unreachable(repository: str, why: str) -> UsageError:
    return UsageError(
        f"{repository}: the hub cannot be reached: {why}",
        hint="check the network, or give a preset, a config.json or a folder",
    )
