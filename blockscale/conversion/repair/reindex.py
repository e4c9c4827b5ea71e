"""The tensors of a folder looked up in its files, where the index cannot be trusted.

What the index says right stays. For the rest, the one file that holds a tensor counts; two copies count only if they
are equal. A tensor that no file holds is lost, and forgotten only where nothing of the model needs it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.folder import Folder
from blockscale.checkpoint.header import TensorInfo, read_chunks, read_header
from blockscale.checkpoint.shards import INDEX_NAME, read_json
from blockscale.checkpoint.structure import DRAFT, kept_reason
from blockscale.errors import CheckpointError
from blockscale.inspection.matrices import is_tied

# Faults of files and index that looking into the files can mend.
MENDED = frozenset(
    (
        *("missing-shard", "ghost-index-entry", "unindexed-tensor", "duplicate-tensor", "unsafe-path"),
        *("wrong-total-size", "missing-index"),
    )
)
_OTHER_COPY = "consolidated*"  # Mistral's own container of the same weights, under other names
_NUMBERED = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")


@dataclass(frozen=True)
class Reindexed:
    """`folder`: with every tensor that there is, and without the faults that are mended by that.

    lost       why the folder cannot be put together without loss, a sentence each
    forgotten  names that the index lists, no file holds and nothing needs
    """

    folder: Folder
    lost: tuple[str, ...]
    forgotten: tuple[str, ...]


def reindex(folder: Folder) -> Reindexed:
    """The same folder, by its files. `folder`: as it was surveyed, by its index."""
    weight_map = _weight_map(folder.path)
    tensors = dict(folder.tensors) if weight_map else {}
    headers, lost = _headers(folder.path)
    if not weight_map:
        lost += _missing_numbers(headers)
    holders: dict[str, list[TensorInfo]] = {}
    for header in headers.values():
        for name, info in header.items():
            if name not in tensors:
                holders.setdefault(name, []).append(info)
    for name, copies in holders.items():
        tensors[name] = copies[0]
        if not _are_equal(copies):
            files = ", ".join(copy.path.name for copy in copies)
            lost.append(f"'{name}' lies in {files} with different bytes, and no index says which counts")
    needless, needed = _sort_ghosts([name for name in weight_map if name not in tensors], tensors, folder.config)
    if needed:
        lost.append(f"no file holds '{needed[0]}'" + (f", nor {len(needed) - 1} more" if len(needed) > 1 else ""))
    left = tuple(fault for fault in folder.faults if not is_mended(fault))
    return Reindexed(replace(folder, tensors=tensors, faults=left), tuple(lost), tuple(needless))


def is_mended(fault: Fault) -> bool:
    """Whether a fault is about the index or about which file counts, and not about what a file holds."""
    if fault.rule == "missing-shard" and not fault.where.endswith(".safetensors"):
        return False  # there are no weights at all
    return fault.rule in MENDED or (fault.rule == "malformed-json" and fault.where == INDEX_NAME)


def _weight_map(path: Path) -> Mapping[str, Any]:
    """Tensor -> file as the index says; empty without one that can be read."""
    try:
        weight_map = read_json(path / INDEX_NAME).get("weight_map")
    except CheckpointError:
        return {}
    return weight_map if isinstance(weight_map, dict) else {}


def _headers(path: Path) -> tuple[dict[str, dict[str, TensorInfo]], list[str]]:
    """Of all files in the folder itself, by name."""
    headers, lost = {}, []
    for file in sorted(path.glob("*.safetensors")):
        if file.name.startswith(".") or file.match(_OTHER_COPY):
            continue
        try:
            headers[file.name] = read_header(file)
        except CheckpointError as e:
            lost.append(str(e))
    return headers, lost


def _missing_numbers(names: Mapping[str, object]) -> list[str]:
    """Shards that the others' names count and that are not there: without an index nothing else tells."""
    found = [match for name in names if (match := _NUMBERED.search(name))]
    lost = []
    for total in dict.fromkeys(int(match[2]) for match in found):
        there = {int(match[1]) for match in found if int(match[2]) == total}
        absent = next((i for i in range(1, total + 1) if i not in there), None)
        if absent is not None:
            lost.append(f"shard {absent} of {total} is missing, by the names of the others")
    return lost


def _are_equal(copies: Sequence[TensorInfo]) -> bool:
    """Whether stored copies of one tensor are the same; one alone is."""
    first = copies[0]
    for other in copies[1:]:
        if (first.dtype, first.shape) != (other.dtype, other.shape):
            return False
        if any(a != b for a, b in zip(read_chunks(first), read_chunks(other), strict=True)):
            return False
    return True


def _sort_ghosts(
    ghosts: Sequence[str], tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Tensors that are not there: those that a model is whole without (buffers that are computed, a head that is tied
    to the embedding, a draft layer of which nothing is there), and the rest."""
    drafts = [name for name in ghosts if _is_draft(name, config)]
    if drafts and any(_is_draft(name, config) for name in tensors):
        drafts = []

    def is_needless(name: str) -> bool:
        is_computed = name.endswith(".inv_freq") or "_quantizer." in name
        return is_computed or (name.endswith("lm_head.weight") and is_tied(config) is True)

    needless = [name for name in ghosts if is_needless(name)] + drafts
    known = set(needless)
    return needless, [name for name in ghosts if name not in known]


def _is_draft(name: str, config: Mapping[str, Any]) -> bool:
    """By the module that a tensor's own lies in: a norm is one wherever it lies."""
    parent = name.rpartition(".")[0].rpartition(".")[0]
    return kept_reason(f"{parent}.up_proj.weight" if parent else name, (2, 2), config) == DRAFT
