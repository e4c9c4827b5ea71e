"""Shared fixtures: golden checkpoints, a tiny tokenizer, tiny random models and hand-written model folders."""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_configs import VOCABULARY, auto_class, tiny_config
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the hub for anything; read when huggingface_hub is imported

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run tests marked slow as well")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # tensors of a few thousand elements gain nothing from more


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def golden_checkpoint() -> Callable[[str], Path]:
    """Name -> folder of a checkpoint in tests/golden/checkpoints. Read only: copy it before changing it."""

    def find(name: str) -> Path:
        folder = GOLDEN / "checkpoints" / name
        assert folder.is_dir(), f"golden checkpoint {name} is missing"
        return folder

    return find


def add_tokenizer(folder: Path) -> Path:
    """Writes a tokenizer of one token a character: ids are ASCII codes, `?` stands for the rest."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({chr(i): i for i in range(VOCABULARY)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "?", "model_max_length": 1_000_000}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def with_tokenizer(
    tmp_path_factory: pytest.TempPathFactory, golden_checkpoint: Callable[[str], Path]
) -> Callable[[str], Path]:
    """Name -> a copy of a golden checkpoint that has a tokenizer. Read only."""
    made: dict[str, Path] = {}

    def copy(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name) / name
            shutil.copytree(golden_checkpoint(name), folder)
            made[name] = add_tokenizer(folder)
        return made[name]

    return copy


@pytest.fixture(scope="session")
def calibration_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 6000 characters, all of them in the tiny tokenizer's vocabulary."""
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(32, 127, (6000,), generator=generator).tolist()
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("".join(map(chr, codes)))
    return path


WriteModel = Callable[..., Path]


@pytest.fixture
def write_model(tmp_path: Path) -> WriteModel:
    """(config, shards, name="model") -> a model folder; more than one shard gets an index."""

    def write(config: Mapping[str, Any], shards: Sequence[Mapping[str, Tensor]], name: str = "model") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(dict(config)))
        if len(shards) == 1:
            save_file(dict(shards[0]), folder / "model.safetensors", metadata={"format": "pt"})
            return folder
        weight_map = {}
        for i, shard in enumerate(shards, 1):
            file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            save_file(dict(shard), folder / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(shard, file))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder

    return write


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Model type -> folder of a random bf16 model of that architecture, with a tokenizer. Read only.

    Every parameter is drawn, norms and biases too, so that none can be lost without moving the logits.
    """
    made: dict[str, Path] = {}

    def save(family: str) -> Path:
        if family not in made:
            generator = torch.Generator().manual_seed(3)
            model = auto_class(family).from_config(tiny_config(family), dtype=torch.bfloat16)
            with torch.no_grad():
                # buffers that are not constant were computed from the config
                learned = (t for t in model.buffers() if t.numel() > 1 and (t == t.flatten()[0]).all())
                for tensor in [*model.parameters(), *learned]:
                    if tensor.is_floating_point():
                        drawn = torch.randn(tensor.shape, generator=generator)
                        tensor.copy_(drawn * 0.12 if tensor.dim() > 1 else tensor + drawn * 0.1)
            folder = tmp_path_factory.mktemp(family) / family
            model.save_pretrained(folder)
            made[family] = add_tokenizer(folder)
        return made[family]

    return save
