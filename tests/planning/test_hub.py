"""Headers of a repository that is read by ranges, with a folder in the place of the hub."""

from pathlib import Path

import pytest

from blockscale.errors import BlockscaleError, CheckpointError, UsageError
from blockscale.planning.models import hub
from blockscale.planning.models.folder import read_model
from blockscale.planning.models.hub import Piece, read_hub_model, read_remote

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
FOLDERS = sorted(path for path in GOLDEN.iterdir() if (path / "config.json").exists())


class Repository:
    """Serves ranges of the files of a folder and counts them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.num_bytes = folder, 0

    def fetch(self, file: str, first: int, num_bytes: int) -> Piece | None:
        path = self.folder / file
        if not path.is_file():
            return None
        content = path.read_bytes()
        piece = content[first : first + num_bytes]
        self.num_bytes += len(piece)
        return Piece(piece, len(content))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_the_bytes_are_those_of_the_folder(folder: Path) -> None:
    architecture, weights = read_remote(f"owner/{folder.name}", Repository(folder).fetch)
    expected, exact = read_model(folder)
    assert weights == exact
    assert weights.is_exact
    assert architecture.num_parameters == expected.num_parameters
    assert architecture.name == f"owner/{folder.name}"


@pytest.mark.parametrize("first_bytes", [8, 100])
def test_headers_and_configs_longer_than_the_first_piece(first_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_FIRST_BYTES", first_bytes)
    assert read_remote("a/b", Repository(FOLDERS[0]).fetch)[1] == read_model(FOLDERS[0])[1]


def test_only_headers_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "_FIRST_BYTES", 64)
    folder = max(FOLDERS, key=lambda path: sum(file.stat().st_size for file in path.glob("*.safetensors")))
    repository = Repository(folder)
    read_remote("a/b", repository.fetch)
    assert repository.num_bytes < sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def test_a_repository_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((FOLDERS[0] / "config.json").read_bytes())
    with pytest.raises(UsageError, match=r"a/b: no model\.safetensors"):
        read_remote("a/b", Repository(tmp_path).fetch)


def test_a_repository_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        read_remote("a/b", Repository(tmp_path).fetch)


@pytest.mark.parametrize(
    "index", ["[]", "{", '{"weight_map": {"x": "../out.safetensors"}}', '{"weight_map": {"x": 3}}']
)
def test_an_index_that_leads_astray(index: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((FOLDERS[0] / "config.json").read_bytes())
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"a/b: model\.safetensors\.index\.json"):
        read_remote("a/b", Repository(tmp_path).fetch)


@pytest.mark.parametrize(
    "content", [b"", b"1234", b"\xff" * 64, b"\x10" + b"\0" * 7 + b"no json at all!!"], ids=range(4)
)
def test_a_file_that_is_no_safetensors(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((FOLDERS[0] / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(BlockscaleError) as caught:
        read_remote("a/b", Repository(tmp_path).fetch)
    assert "/tmp" not in str(caught.value)


def test_offline_says_so() -> None:
    with pytest.raises(UsageError, match="offline mode is on") as caught:
        read_hub_model("owner/name")
    assert "preset" in caught.value.hint


def test_size_of_the_whole_file() -> None:
    assert hub._size({"Content-Range": "bytes 0-255999/4976698672"}, 256_000) == 4_976_698_672
    assert hub._size({}, 12) == 12
    assert hub._size({"Content-Range": "bytes 0-9/*"}, 10) == 10
