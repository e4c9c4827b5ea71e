"""The streaming writer that conversion and repair share."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.files import GOLDEN, same
from checkpoint.files import tensors as read_tensors
from safetensors import safe_open

from blockscale.checkpoint.folder import open_folder
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.conversion.rewrite import (
    Job,
    Made,
    Written,
    copy_kv_scales,
    copy_linear,
    keep_tensor,
    source_record,
    write_checkpoint,
)
from blockscale.errors import CheckpointError, OutputError

SOURCE = GOLDEN / "modelopt_llama_nvfp4_fp8kv"


def all_jobs(source: Path = SOURCE) -> list[Job]:
    checkpoint = open_checkpoint(source)
    assert checkpoint.quantized is not None
    return [
        *(copy_kv_scales(attention, infos) for attention, infos in checkpoint.quantized.kv_tensors.items()),
        *(keep_tensor(tensor) for tensor in checkpoint.kept.values()),
        *(copy_linear(linear) for linear in checkpoint.quantized.linears.values()),
    ]


def write(out: Path, jobs: list[Job], **options: Any) -> Written:
    config = open_folder(SOURCE).config
    return write_checkpoint(
        out, jobs, **{"dialect": "modelopt", "config": config, "kv_format": "fp8", "provenance": {}, **options}
    )


def stored_order(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        offsets = file.offset_keys()
    return list(offsets)


def test_pieces_lie_in_the_sources_order(tmp_path: Path) -> None:
    """A linear's tensors side by side, where its first was; whatever order the jobs come in."""
    write(tmp_path / "a", all_jobs())
    write(tmp_path / "b", list(reversed(all_jobs())))
    assert stored_order(tmp_path / "a") == stored_order(tmp_path / "b")
    kept = [n for n in stored_order(SOURCE) if n.endswith("norm.weight")]
    assert [n for n in stored_order(tmp_path / "a") if n.endswith("norm.weight")] == kept
    before, after = read_tensors(SOURCE), read_tensors(tmp_path / "a")
    assert before.keys() == after.keys()
    assert all(same(tensor, after[n]) for n, tensor in before.items())


def test_shards_of_a_given_size(tmp_path: Path) -> None:
    written = write(tmp_path / "out", all_jobs(), max_shard_bytes=40_000)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 2
    assert written.num_bytes == sum(path.stat().st_size for path in shards)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == read_tensors(SOURCE).keys()
    assert open_checkpoint(tmp_path / "out").quantized is not None


def test_progress_counts_every_byte_of_the_source(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    write(tmp_path / "out", all_jobs(), stage="repairing", progress=lambda *step: seen.append(step))
    assert {stage for stage, _, _ in seen} == {"repairing"}
    assert {total for _, _, total in seen} == {open_folder(SOURCE).num_bytes}
    done = [step[1] for step in seen]
    assert done == sorted(done)
    assert done[-1] == open_folder(SOURCE).num_bytes


def made(errors: Mapping[str, float]) -> Job:
    stored = open_folder(SOURCE).tensors["model.norm.weight"]
    name = "model.extra.weight"
    return Job(
        name,
        (stored,),
        layout={name: (torch.float32, (3,))},
        make=lambda: Made({name: torch.arange(3.0)}, errors),
    )


def test_what_is_made_and_its_errors(tmp_path: Path) -> None:
    """Errors of 0 are none; the others stand in the record, with the versions and what the caller says."""
    written = write(tmp_path / "out", [*all_jobs(), made({"a": 0.25, "b": 0.0})], provenance={"recipe": "r"})
    assert written.errors == {"a": 0.25}
    assert torch.equal(read_tensors(tmp_path / "out")["model.extra.weight"], torch.arange(3.0))
    record = source_record(tmp_path / "out")
    assert record is not None
    assert record["errors"] == {"a": 0.25}
    assert record["recipe"] == "r"
    assert record["torch"] == torch.__version__
    assert source_record(SOURCE) is None


def test_what_comes_out_otherwise_than_it_was_planned(tmp_path: Path) -> None:
    stored = open_folder(SOURCE).tensors["model.norm.weight"]
    wrong = Job(
        "x", (stored,), layout={"x.weight": (torch.float32, (3,))}, make=lambda: Made({"x.weight": torch.ones(4)})
    )
    missing = Job("x", (stored,), layout={"x.weight": (torch.float32, (3,))}, make=lambda: Made({}))
    for job in (wrong, missing):
        with pytest.raises(OutputError, match="planned"):
            write(tmp_path / "out", [*all_jobs(), job])
    assert list(tmp_path.iterdir()) == []


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    jobs = all_jobs()
    with pytest.raises(CheckpointError, match="would be written twice"):
        write(tmp_path / "out", [*jobs, jobs[0]])
    assert list(tmp_path.iterdir()) == []


def test_configs_follow_the_tensors(tmp_path: Path) -> None:
    """A layer that is no longer quantized is on the lists."""
    checkpoint = open_checkpoint(SOURCE)
    assert checkpoint.quantized is not None
    linear = checkpoint.quantized.linears["model.layers.0.self_attn.o_proj"]
    name = f"{linear.name}.weight"
    plain = Job(
        linear.name,
        tuple(linear.tensors.values()),
        layout={name: (torch.bfloat16, linear.shape)},
        make=lambda: Made({name: torch.ones(linear.shape, dtype=torch.bfloat16)}),
    )
    write(tmp_path / "out", [plain, *(job for job in all_jobs() if job.name != linear.name)])
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    nested = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert config["ignore"] == nested["exclude_modules"]
    assert set(config["ignore"]) == {"lm_head", "model.embed_tokens", linear.name}
    assert nested["kv_cache_quant_algo"] == "FP8"
