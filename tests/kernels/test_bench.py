"""`bench kernels` on a CPU: rows, tables and refusals; no time is asserted. Needs nothing."""

import json
from pathlib import Path

import pytest
import torch

from blockscale.cli.main import main
from blockscale.errors import UsageError
from blockscale.formats.spec import MXFP4, NVFP4
from blockscale.kernels.bench import clock, linear, run
from blockscale.kernels.bench.linear import Row, bench_linears, random_weight, table_rows
from blockscale.kernels.measured import tables, to_dict
from blockscale.kernels.select import Kernel, Op

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Few repetitions, few bytes, and no compiler: what is timed is plain torch."""
    monkeypatch.setattr(clock, "_CPU_SECONDS", 0.0)
    monkeypatch.setattr(clock, "COLD_BYTES", 1_000_000)
    monkeypatch.setenv("BLOCKSCALE_CACHE", str(tmp_path))
    for module in (linear,):
        usable = module.usable
        monkeypatch.setattr(
            module,
            "usable",
            lambda op, device, usable=usable: [c for c in usable(op, device) if c.kernel is Kernel.TORCH],
        )


def test_rows_hold_what_was_measured() -> None:
    rows = bench_linears([(64, 96)], [1, 5], CPU, fmt=NVFP4)
    assert [(r.op, r.kernel, r.m) for r in rows] == [
        ("linear_w4a16", "torch bfloat16", 1),
        ("linear_w4a16", "torch bfloat16", 5),
        ("linear_w4a16", "torch", 1),
        ("linear_w4a16", "torch", 5),
        ("linear_w4a8", "torch", 1),
        ("linear_w4a8", "torch", 5),
    ]
    for row in rows:
        assert row.us > 0
        assert row.tflop_per_s == pytest.approx(2 * row.m * 64 * 96 / row.us / 1e6)
        stored = 64 * 96 * 2 if row.kernel == "torch bfloat16" else 64 * 96 // 2 + 64 * 96 // 16 + 4
        assert row.tb_per_s == pytest.approx(stored / row.us / 1e6)
        assert row.error < (0.2 if row.op == "linear_w4a8" else 0.01)
        assert (row.ratio is None) == (row.kernel == "torch bfloat16")
        assert row.failure == ""
    assert rows[2].ratio == pytest.approx(rows[0].us / rows[2].us)


def test_what_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(op: Op, kernel: Kernel) -> None:
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(linear, "launcher", broken)
    rows = bench_linears([(32, 32)], [1], CPU)
    assert [r.failure for r in rows] == ["", "RuntimeError: out of shared memory", "RuntimeError: out of shared memory"]
    assert rows[1].us is None


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4])
def test_random_weights_have_every_code_and_tame_products(fmt: object) -> None:
    weight = random_weight(64, 256, fmt, torch.bfloat16, CPU)
    assert len(weight.packed.unique()) == 256
    assert weight.block_scale.unique().numel() > 4
    assert weight.block_scale.amax() < 127 or fmt is MXFP4


def test_a_table_is_made_of_what_the_dispatch_chooses_from(tmp_path: Path) -> None:
    def row(kernel: str, us: float | None, m: int = 1) -> Row:
        return Row("linear_w4a16", kernel, 8, 16, m, us, None, None, None, None, None, False)

    rows = [row("torch bfloat16", 1.0), row("triton/linear", 3.0), row("humming", 2.0), row("cuda/linear_small", None)]
    (made,) = table_rows(rows)
    assert made.times_us == {Kernel.TRITON_LINEAR: 3.0, Kernel.HUMMING: 2.0}
    made = run.Table("g", (9, 0), "2026-01-01", {}, "bench", table_rows(rows))
    (tmp_path / "g.json").write_text(json.dumps(to_dict(made)), encoding="utf-8")
    assert tables(tmp_path) == (made,)


def test_a_weight_is_cold() -> None:
    assert clock.num_copies(600_000) == 2
    assert clock.num_copies(10_000_000) == 1
    assert clock.num_copies(1) == clock.MAX_COPIES


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--shape", "64,96", "--m", "1", "--device", "cpu", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["kernel"] for row in rows} == {"torch bfloat16", "torch"}
    assert all(row["n"] == 64 and row["k"] == 96 for row in rows)
    assert main(["bench", "kernels", "--shape", "64x96", "--m", "1", "--device", "cpu", "--format", "mxfp4"]) == 0
    table = capsys.readouterr().out
    assert "64x96" in table
    assert "linear_w4a16: torch *" in table


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--shape", "64"], "--shape 64: not a shape"),
        (["--shape", "64,30"], "K = 30"),
        (["--shape", "0,32"], "nothing to measure"),
        (["--shape", "64,32", "--m", "0"], "nothing to measure"),
        (["--shape", "64,32", "--format", "fp8"], "no kernels for fp8"),
        (["--shape", "64,32", "--device", "gpu"], "no device 'gpu'"),
        (["--shape", "64,32", "--device", "cuda:99"], "no device 'cuda:99'"),
        (["--shape", "64,32", "--device", "cpu", "--table", "t.json"], "a table is kept of a GPU"),
        (["--model", "llama-9"], "llama-9"),
    ],
)
def test_bad_usage_is_one_error_and_one_hint(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert main(["bench", "kernels", *argv]) == 2
    error, hint = capsys.readouterr().err.strip().split("\n")
    assert error.startswith("error: ")
    assert message in error
    assert hint.startswith("hint: ")


def test_shapes_of_models() -> None:
    from blockscale.planning.models.model import find_model, linear_shapes

    assert linear_shapes(find_model("llama-3.1-8b")) == ((4096, 4096), (1024, 4096), (28672, 4096), (4096, 14336))
    assert (768, 2048) not in linear_shapes(find_model("qwen3-30b-a3b"))
    assert (3072, 12288) in linear_shapes(find_model("flux.1-dev"))


def test_no_shape_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to measure"):
        run.bench_kernels([], [1])
