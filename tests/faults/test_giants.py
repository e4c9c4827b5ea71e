"""The largest models as sparse files: right to the byte, and looked at in little memory."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from . import giants
from .fresh import run_fresh
from .raw import INDEX, read_header, read_json, shards

LLAMA_PARAMETERS = 405_853_388_800  # as its publisher counts them
DEEPSEEK_PARAMETERS = 671_026_419_200  # without the draft layer
INSPECT_MB = 500


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return giants.llama_405b(tmp_path_factory.mktemp("giants") / "llama-405b")


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return giants.deepseek_r1(tmp_path_factory.mktemp("giants") / "deepseek-r1")


def parameters(folder: Path, counts: Callable[[str], bool] = lambda name: True) -> int:
    """What the stored tensors stand for: two a byte of codes, none a scale."""
    total = 0
    for shard in shards(folder):
        for name, entry in read_header(shard)[0].items():
            if name == "__metadata__" or name.endswith(("_scale", "_scale_2")) or not counts(name):
                continue
            total += math.prod(entry["shape"]) * (2 if entry["dtype"] == "U8" else 1)
    return total


def test_llama_has_its_parameters(llama: Path) -> None:
    assert parameters(llama) == LLAMA_PARAMETERS


def test_deepseek_has_its_parameters(deepseek: Path) -> None:
    body = parameters(deepseek, lambda name: not name.startswith("model.layers.61."))
    assert body == DEEPSEEK_PARAMETERS


@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_files_are_as_large_as_their_headers_say(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    index = read_json(folder / INDEX)
    held, data_bytes = {}, 0
    for shard in shards(folder):
        header, begin = read_header(shard)
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        assert shard.stat().st_size == begin + max(ends)
        assert max(ends) <= giants.SHARD_BYTES
        data_bytes += max(ends)
        held |= {key: shard.name for key in header if key != "__metadata__"}
    assert held == index["weight_map"]
    assert data_bytes == index["metadata"]["total_size"]


@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_they_take_little_disk(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    used = sum(file.stat().st_blocks * 512 for file in folder.iterdir())
    assert used < 64e6
    assert sum(file.stat().st_size for file in folder.iterdir()) > 200e9


def test_bytes_follow_from_the_format(llama: Path) -> None:
    """4.5 bits a quantized weight, 16 bits of the rest, 8 bytes a linear and 8 a layer's cache."""
    config = read_json(llama / "config.json")
    layers = config["num_hidden_layers"]
    ends = 2 * config["vocab_size"] * config["hidden_size"]
    norms = (2 * layers + 1) * config["hidden_size"]
    packed = LLAMA_PARAMETERS - ends - norms
    expected = packed // 2 + packed // 16 + 2 * (ends + norms) + 8 * 7 * layers + 8 * layers
    assert read_json(llama / INDEX)["metadata"]["total_size"] == expected


def test_opening_reads_headers_only(deepseek: Path) -> None:
    code = f"""
from pathlib import Path
from blockscale.checkpoint.reader import bits_per_parameter, open_checkpoint
checkpoint = open_checkpoint(Path({str(deepseek)!r}))
result = [len(checkpoint.quantized.linears), bits_per_parameter(checkpoint)]
"""
    done, empty = run_fresh(code), run_fresh("import torch\nresult = None")  # builds of torch differ in size
    num_linears, bits = done.result
    assert num_linears == 3 * 3 + 58 * 257 * 3
    assert 4.5 < bits < 5
    assert done.peak_mb - empty.peak_mb < 300


@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_inspect_takes_little_memory(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    done = run_fresh(f"import blockscale\nresult = blockscale.inspect({str(folder)!r}).to_dict()['bytes']")
    assert done.result == read_json(folder / INDEX)["metadata"]["total_size"]
    assert done.peak_mb < INSPECT_MB


@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_a_quick_lint_finds_the_holes_alone_and_takes_little_memory(name: str, request: pytest.FixtureRequest) -> None:
    """Headers, configs and single scales are right; nearly all of every file was never written."""
    folder = request.getfixturevalue(name)
    code = f"""
import blockscale
report = blockscale.lint({str(folder)!r}, quick=True)
result = [[f.name, f.layer] for f in report.findings]
"""
    done = run_fresh(code)
    assert sorted(done.result) == [["unwritten-data", shard.name] for shard in shards(folder)]
    assert done.peak_mb < INSPECT_MB
