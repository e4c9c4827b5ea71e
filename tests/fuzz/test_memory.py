"""Files that would like to be memory: what is not there is not allocated."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.fresh import run_fresh
from faults.raw import INDEX, SINGLE

from .targets import TARGETS

ROOM_BYTES = 1 << 30  # beside what the imports take
CODE = """
import resource
from pathlib import Path
import sys
sys.path.insert(0, "tests")
from fuzz.targets import TARGETS, outcome
import blockscale.checkpoint.load
status = Path("/proc/self/status").read_text()
used = int(next(line for line in status.splitlines() if line.startswith("VmSize")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + {room}, used + {room}))
result = {{name: outcome(target, Path({folder!r})) for name, target in TARGETS.items()}}
"""


def sparse(path: Path, header: bytes, num_bytes: int, length: int | None = None) -> None:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header)
    with path.open("r+b") as file:
        file.truncate(num_bytes)


def header_of_10_gb(folder: Path) -> None:
    sparse(folder / SINGLE, b"{}", 12 << 30, 10 << 30)


def header_of_90_mb_of_brackets(folder: Path) -> None:
    (folder / SINGLE).write_bytes(struct.pack("<Q", 90_000_000) + b"[" * 90_000_000)


def header_of_90_mb_of_spaces(folder: Path) -> None:
    (folder / SINGLE).write_bytes(struct.pack("<Q", 90_000_000) + b"{}" + b" " * 89_999_998)


def a_tensor_of_2_to_the_62(folder: Path) -> None:
    entry = {"dtype": "U8", "shape": [2**62], "data_offsets": [0, 2**62]}
    sparse(folder / SINGLE, json.dumps({"a.weight": entry}).encode(), 1 << 20)


def scales_of_4_tb(folder: Path) -> None:
    """A hole of a file, as long as it says: headers are right, and nothing of it needs to be read to say so."""
    rows, k = 1 << 20, 1 << 22
    sizes = {
        "weight": ("U8", [rows, k // 2]),
        "weight_scale": ("F8_E4M3", [rows, k // 16]),
        "weight_scale_2": ("F32", []),
    }
    header, position = {}, 0
    for name, (dtype, shape) in sizes.items():
        end = position + (4 if dtype == "F32" else shape[0] * shape[1])
        header[f"model.layers.0.mlp.down_proj.{name}"] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header).encode()
    sparse(folder / SINGLE, text, 8 + len(text) + position)


def index_of_100_mb(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"a": "' + "x" * 100_000_000 + '"}}')


def endless_config(folder: Path) -> None:
    """12 GB of zero bytes."""
    with (folder / "config.json").open("r+b") as file:
        file.truncate(12 << 30)


def deep_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"a":' * 5_000_000 + "0" + "}" * 5_000_000)


CLAIMS = (header_of_10_gb, header_of_90_mb_of_brackets, header_of_90_mb_of_spaces, a_tensor_of_2_to_the_62,
          scales_of_4_tb, index_of_100_mb, endless_config, deep_config)  # fmt: skip


@pytest.mark.parametrize("claim", CLAIMS)
def test_claims_are_not_allocated(claim: Callable[[Path], None], tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 1, "quantization_config": {"quant_method": "modelopt",
              "quant_algo": "W4A16_NVFP4", "group_size": 16, "ignore": []}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    sparse(tmp_path / SINGLE, b"{}", 10)
    claim(tmp_path)
    done = run_fresh(CODE.format(room=ROOM_BYTES, folder=str(tmp_path)))
    assert done.result.keys() == TARGETS.keys()
    assert any(done.result.values()) or claim in (scales_of_4_tb, header_of_90_mb_of_spaces)
