"""`blockscale bench engine`: its rows, its table and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from engine.test_bench import SUBJECT, run

from blockscale.cli.bench import print_engine_rows
from blockscale.cli.main import main
from blockscale.engine.bench.figures import row
from blockscale.engine.bench.workload import Workload

Find = Callable[[str], Path]
SHORT = ["--input", "24", "--output", "4", "--device", "cpu"]


def test_rows_of_random_weights(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "engine", "--random", "tiny", "--concurrency", "1", "2", "--rate", "500", *SHORT, "--json"]
    assert main([*argv, "--requests", "3", "--kv-cache", "fp8"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [r["load"] for r in rows] == ["1 at once", "2 at once", "500 a second"]
    for found in rows:
        assert (found["model"], found["weights"], found["kv_cache"]) == ("tiny", "nvfp4", "fp8")
        assert (found["num_requests"], found["num_failed"]) == (3, 0)
        assert (found["input_tokens"], found["output_tokens"]) == (24, 4)
        assert found["ttft_ms"]["p50"] > 0
        assert found["tokens_per_s"] > 0
    assert 0 < rows[0]["read_share"] < 2


def test_a_checkpoint_in_a_table(with_tokenizer: Find, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", str(with_tokenizer("modelopt_llama_nvfp4")), *SHORT]) == 0
    title, headers, first = capsys.readouterr().out.splitlines()
    assert title.endswith("24 tokens in, 4 out")
    assert "nvfp4 weights, bf16 cache" in title
    assert headers.startswith("load")
    assert first.split()[:4] == ["1", "at", "once", "4"]


def test_the_table_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    workload = Workload(3, 5, 4, concurrency=3)
    result, _ = run(workload, bad=["bench-1"])
    print_engine_rows([row(SUBJECT, workload, result, 4.0), row(SUBJECT, workload, result, None)])
    title, headers, first, second = capsys.readouterr().out.splitlines()
    assert title == "m: nvfp4 weights, bf16 cache, on cpu; 5 tokens in, 4 out"
    assert [headers.split()[0], headers.split()[-1]] == ["load", "J/token"]
    assert first.split()[:3] == ["3", "at", "once"]
    assert "3 (1 failed)" in first
    assert "10000.0" in first
    assert first.split()[-1] == "0.500"
    assert second.split()[-1] == "-"


BAD = {
    "nothing to time": ([], "neither a checkpoint nor a random model"),
    "both": (["{llama}", "--random", "tiny"], "or both"),
    "a checkpoint's format": (["{llama}", "--format", "bf16"], "--format is for random weights"),
    "cache": (["{llama}", "--kv-cache", "fp9"], "no cache in 'fp9'"),
    "device": (["{llama}", "--device", "tpu"], "'tpu' is not available"),
    "no tokens": (["{llama}", "--output", "0"], "no load: 4 requests"),
    "draft": (["{llama}", "--num-draft", "-1"], "num_draft cannot be -1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, with_tokenizer: Find, capsys: pytest.CaptureFixture[str]) -> None:
    options, expected = BAD[case]
    places = {"{llama}": str(with_tokenizer("base_llama"))}
    argv = [places.get(option, option) for option in options]
    device = [] if "--device" in argv else ["--device", "cpu"]
    assert main(["bench", "engine", *argv, *device]) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("error: ") == 1
    assert "hint: " in said
