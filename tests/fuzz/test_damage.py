"""Damaged headers, configs and indexes, by the thousand: an error that says something, or none."""

import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from .mutate import damage_bytes, damage_json
from .targets import READERS, TARGETS, VERBS, outcome

Find = Callable[[str], Path]
BASES = ("modelopt_llama_nvfp4_fp8kv", "ct_llama_nvfp4_fp8kv", "modelopt_llama_mixed_fp8attn_nvfp4mlp_fp8kv",
         "modelopt_qwen3moe_nvfp4", "ct_llama_mxfp4", "base_llama")  # fmt: skip
JSON_FILES = ("config.json", "hf_quant_config.json", "model.safetensors.index.json", "generation_config.json")
SEEDS = range(6)
ROUNDS = 40  # damages a seed


def sharded(name: str, golden_checkpoint: Find, parent: Path) -> Path:
    """A copy in two files with an index."""
    from faults.raw import split

    folder = Path(shutil.copytree(golden_checkpoint(name), parent / name))
    split(folder, 2)
    return folder


def ask_all(folder: Path, what: str, targets: tuple[str, ...] = tuple(TARGETS)) -> None:
    for name in targets:
        try:
            outcome(TARGETS[name], folder)
        except Exception as error:
            error.add_note(f"{name}, {what}")
            raise


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("base", BASES)
def test_json(base: str, seed: int, golden_checkpoint: Find, tmp_path: Path) -> None:
    folder = sharded(base, golden_checkpoint, tmp_path)
    draw = random.Random(f"{base} {seed}")
    files = [folder / name for name in JSON_FILES if (folder / name).exists()]
    whole = {file: file.read_text() for file in files}
    for i in range(ROUNDS):
        file = draw.choice(files)
        file.write_bytes(damage_json(whole[file], draw))
        ask_all(folder, f"{file.name}, round {i}", tuple(READERS) if i % 4 else tuple(TARGETS))
        file.write_text(whole[file])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("base", BASES)
def test_headers(base: str, seed: int, golden_checkpoint: Find, tmp_path: Path) -> None:
    """The header's text is damaged, with a length before it that fits or not."""
    folder = sharded(base, golden_checkpoint, tmp_path)
    draw = random.Random(f"{base} {seed}")
    file = sorted(folder.glob("*.safetensors"))[seed % 2]
    whole = file.read_bytes()
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    for i in range(ROUNDS):
        spoil = damage_json if draw.random() < 0.6 else lambda text, draw: damage_bytes(text.encode(), draw)
        text = spoil(whole[8:end].decode(), draw)
        length = len(text) if draw.random() < 0.8 else draw.choice((0, 1, end, 2**31, 10 << 30, 2**63, 2**64 - 1))
        file.write_bytes(struct.pack("<Q", length) + text + whole[end:])
        ask_all(folder, f"round {i}", tuple(READERS) if i % 4 else tuple(TARGETS))
    file.write_bytes(whole)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("base", BASES)
def test_values(base: str, seed: int, golden_checkpoint: Find, tmp_path: Path) -> None:
    """Any bytes are values: what reads them may find them bad, and nothing else."""
    folder = sharded(base, golden_checkpoint, tmp_path)
    draw = random.Random(f"{base} {seed}")
    file = sorted(folder.glob("*.safetensors"))[seed % 2]
    whole = file.read_bytes()
    begin = 8 + struct.unpack("<Q", whole[:8])[0]
    for i in range(ROUNDS // 8):
        data = bytearray(whole)
        for _ in range(200):
            data[draw.randrange(begin, len(data))] = draw.choice((0, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        file.write_bytes(data)
        ask_all(folder, f"round {i}", tuple(VERBS))
