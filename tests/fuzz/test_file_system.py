"""Folders whose files are no files: pipes, devices, folders, links; and files that must never be opened."""

import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoint.child import run_child
from faults.breaking_files import PICKLE_RAN, pickle_file
from faults.raw import INDEX, SINGLE, edit_json, split

from .targets import TARGETS, Target, opened_paths, outcome

Find = Callable[[str], Path]
NAMES = (SINGLE, INDEX, "config.json", "hf_quant_config.json")
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)


@pytest.fixture
def folder(golden_checkpoint: Find, tmp_path: Path) -> Path:
    return Path(shutil.copytree(golden_checkpoint("modelopt_llama_nvfp4"), tmp_path / "model"))


@pytest.fixture
def in_shards(folder: Path) -> Path:
    split(folder, 2)
    return folder


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def nothing(path: Path) -> None:
    path.symlink_to("/dev/null")


def subfolder(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def circle(path: Path) -> None:
    other = path.with_name("other-" + path.name)
    other.symlink_to(path.name)
    path.symlink_to(other.name)


def dangling(path: Path) -> None:
    path.symlink_to("not-there")


def empty(path: Path) -> None:
    path.touch()


def secret(path: Path) -> None:
    path.symlink_to("/etc/passwd")


ODD_FILES = (pipe, endless, nothing, subfolder, loop, circle, dangling, empty, secret)


@each_target
@pytest.mark.parametrize("make", ODD_FILES)
@pytest.mark.parametrize("name", NAMES)
def test_odd_files_for_known_names(name: str, make: Callable[[Path], None], target: Target, folder: Path) -> None:
    """In place of each file that is read. Its content, if it is somebody else's, is not repeated."""
    if name == INDEX:
        split(folder, 2)
    (folder / name).unlink()
    make(folder / name)
    message = outcome(target, folder) or ""
    assert "root:" not in message


@each_target
@pytest.mark.parametrize("make", ODD_FILES)
@pytest.mark.parametrize("is_indexed", [False, True])
def test_odd_files_beside_the_weights(
    is_indexed: bool, make: Callable[[Path], None], target: Target, folder: Path
) -> None:
    if is_indexed:
        split(folder, 2)
        edit_json(folder / INDEX, lambda index: index["weight_map"].update({"x.weight": "odd.safetensors"}))
    make(folder / "odd.safetensors")
    message = outcome(target, folder) or ""
    assert "root:" not in message


@each_target
@pytest.mark.parametrize("make", [pipe, endless, subfolder, loop, dangling])
def test_odd_companions(make: Callable[[Path], None], target: Target, folder: Path) -> None:
    """Files that would only be copied along."""
    for name in ("tokenizer.json", "blockscale.json", "model.bin", "chat_template.jinja"):
        make(folder / name)
    outcome(target, folder)


@each_target
@pytest.mark.parametrize("make", [pipe, endless, nothing, loop, dangling, empty])
def test_odd_folders(make: Callable[[Path], None], target: Target, tmp_path: Path) -> None:
    if target is TARGETS["headers"]:
        pytest.skip("it is given files")
    make(tmp_path / "model")
    assert outcome(target, tmp_path / "model")


PICKLES = ("pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl", "config.json", "tokenizer.json",
           SINGLE)  # fmt: skip
OUTSIDE = ("../outside.safetensors", "../../../../../../etc/passwd", "/etc/passwd", "sub/../../outside.safetensors",
           "./../outside.safetensors", "~/x", "\0", "a\0b", "", ".", "..", "/", "sub", "x" * 300, "sub/" * 600,
           "CON", "\ud800.safetensors", "a\nb.safetensors", FIRST + "/", FIRST + "/x", "file:///etc/passwd",
           "..\\outside.safetensors", "%2e%2e/outside.safetensors")  # fmt: skip


@each_target
@pytest.mark.parametrize("name", OUTSIDE, ids=ascii)
@pytest.mark.parametrize("tensor", ["x.weight", "model.norm.weight"])
def test_an_index_that_leads_elsewhere(tensor: str, name: str, target: Target, in_shards: Path) -> None:
    """Nothing outside the folder is opened, whatever the index says."""
    outside = in_shards.parent / "outside.safetensors"
    shutil.copy(in_shards / SECOND, outside)
    (in_shards / "sub").mkdir()
    edit_json(in_shards / INDEX, lambda index: index["weight_map"].update({tensor: name}))
    with opened_paths() as opened:
        outcome(target, in_shards)
    ours = [path for path in opened if path.startswith((str(in_shards.parent), "/etc"))]
    assert ours or target is TARGETS["headers"]
    assert all(Path(path).is_relative_to(in_shards) for path in ours), ours


@each_target
def test_links_of_a_download_cache_are_followed(target: Target, in_shards: Path) -> None:
    """A hub's cache keeps contents in one folder and links to them from another."""
    blobs = in_shards.parent / "blobs"
    blobs.mkdir()
    for i, file in enumerate(sorted(in_shards.iterdir())):
        file.rename(blobs / f"{i:064d}")
        file.symlink_to(f"../blobs/{i:064d}")
    message = outcome(target, in_shards)
    if target is TARGETS["source"]:
        assert "already quantized" in (message or "")
    elif target is TARGETS["convert to gguf"]:
        assert "tokenizer" in (message or "")  # the folder has none, and gets so far
    else:
        assert message is None


@pytest.fixture
def readable_by_all(folder: Path) -> Iterator[Path]:
    """A copy whose parents anybody may enter, as pytest's own folders may not."""
    parent = Path(tempfile.mkdtemp())
    parent.chmod(0o755)
    yield Path(shutil.copytree(folder, parent / "model"))
    shutil.rmtree(parent)


@each_target
@pytest.mark.parametrize("name", [*NAMES, "."])
def test_files_without_rights(name: str, target: Target, readable_by_all: Path) -> None:
    """As another user, since root may read everything."""
    if name == INDEX:
        split(readable_by_all, 2)
    outcome(target, readable_by_all)  # whatever is imported late is so by now
    (readable_by_all / name).chmod(0)

    def as_nobody() -> None:
        if os.geteuid() == 0:
            os.setegid(65534)
            os.seteuid(65534)
        message = outcome(target, readable_by_all)
        # what goes on past faults says them in its result; a folder that it may not enter, it cannot go on from
        goes_on = (TARGETS["inspect"], TARGETS["lint"])
        is_needed = name == "." or (name in (SINGLE, "config.json") and target not in goes_on)
        assert message or not is_needed or target is TARGETS["headers"]

    assert run_child(as_nobody) == 0


@each_target
@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.parametrize("is_alone", [False, True])
def test_pickles_are_never_loaded(is_alone: bool, name: str, target: Target, folder: Path) -> None:
    if is_alone:
        for file in folder.glob("*.safetensors"):
            file.unlink()
    pickle_file(name)(folder)
    with opened_paths() as opened:
        outcome(target, folder)
    assert not (folder / PICKLE_RAN).exists()
    if name.endswith((".bin", ".pt", ".pth", ".ckpt")):  # others may be copied along, as they are
        assert str(folder / name) not in opened


def test_a_file_that_is_shorter_than_when_it_was_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a header that was cut between two calls."""
    file = folder / SINGLE
    whole = file.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    real = os.fstat(0).__class__

    def longer(self: Path, **options: object) -> os.stat_result:
        found = os.stat(self)
        return real((*found[:6], len(whole), *found[7:])) if self == file else found

    file.write_bytes(whole[: length // 2])
    monkeypatch.setattr(Path, "stat", longer)
    assert outcome(TARGETS["folder"], folder)
