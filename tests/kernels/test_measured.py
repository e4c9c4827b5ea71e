"""Kernels chosen by measured times: tables, the nearest GPU, the nearest shape, between two M. Needs nothing."""

import json
from pathlib import Path

import pytest

from blockscale.errors import UsageError
from blockscale.formats.spec import NVFP4
from blockscale.formats.tensor import encode
from blockscale.kernels import linears, measured, select
from blockscale.kernels.device import Device
from blockscale.kernels.measured import Row, Table, estimated_us, fastest, nearest_table, read, tables, to_dict
from blockscale.kernels.prepare import Layout, row_major
from blockscale.kernels.select import Kernel, Op

SMALL, LARGE, TRITON, HUMMING = (
    Kernel.CUDA_LINEAR_SMALL,
    Kernel.CUDA_LINEAR_LARGE,
    Kernel.TRITON_LINEAR,
    Kernel.HUMMING,
)
ROWS = (
    Row(Op.LINEAR_W4A16, 4096, 4096, 1, {SMALL: 5.0, LARGE: 9.0, TRITON: 8.0}),
    Row(Op.LINEAR_W4A16, 4096, 4096, 33, {SMALL: 13.0, LARGE: 11.0}),
    Row(Op.LINEAR_W4A16, 4096, 4096, 1024, {LARGE: 50.0, TRITON: 49.0}),
    Row(Op.LINEAR_W4A16, 65536, 8192, 1, {SMALL: 80.0, LARGE: 70.0}),
)


def device(capability: tuple[int, int], name: str) -> Device:
    return Device("cuda", capability, name, 132, 232448, 60 << 20)


def table(capability: tuple[int, int], gpu: str, rows: tuple[Row, ...] = ROWS) -> Table:
    return Table(gpu, capability, "2026-01-01", {"torch": "2.11"}, "blockscale bench kernels", rows)


def test_a_table_reads_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "h200.json"
    file.write_text(json.dumps(to_dict(table((9, 0), "NVIDIA H200"))), encoding="utf-8")
    assert read(file) == table((9, 0), "NVIDIA H200")
    assert tables(tmp_path) == (table((9, 0), "NVIDIA H200"),)


@pytest.mark.parametrize("text", ["", "[]", '{"rows": [{}]}', '{"rows": [], "capability": 9}'])
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "t.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="not a table"):
        read(file)


def test_the_nearest_gpu() -> None:
    h200, h100, a100, b200 = (
        table((9, 0), "NVIDIA H200"),
        table((9, 0), "NVIDIA H100"),
        table((8, 0), "NVIDIA A100"),
        table((10, 0), "NVIDIA B200"),
    )
    every = (a100, h100, b200, h200)
    assert nearest_table(device((9, 0), "NVIDIA H200"), every) is h200
    assert nearest_table(device((9, 0), "NVIDIA GH200"), every) is h100
    assert nearest_table(device((8, 6), "NVIDIA A40"), every) is a100
    assert nearest_table(device((10, 3), "NVIDIA B300"), every) is b200
    assert nearest_table(device((12, 0), "NVIDIA RTX"), (h200, a100)) is h200
    assert nearest_table(device((9, 0), "NVIDIA H200"), ()) is None
    assert nearest_table(Device("cpu", None, "CPU", 1, 0, 0), every) is None


@pytest.mark.parametrize(
    ("n", "k", "m", "expected"),
    [
        (4096, 4096, 1, SMALL),
        (4096, 4096, 16, SMALL),  # 8.75 against 9.94
        (4096, 4096, 32, LARGE),
        (5120, 4096, 1, SMALL),
        (57344, 8192, 1, LARGE),
    ],
)
def test_the_fastest_of_two(n: int, k: int, m: int, expected: Kernel) -> None:
    assert fastest(table((9, 0), "g"), Op.LINEAR_W4A16, n, k, m, (SMALL, LARGE)) is expected


def test_times_between_and_beyond() -> None:
    known = table((9, 0), "g")
    assert estimated_us(known, Op.LINEAR_W4A16, 4096, 4096, 17, (LARGE,)) == {LARGE: 10.0}
    assert estimated_us(known, Op.LINEAR_W4A16, 4096, 4096, 4096, (LARGE, TRITON)) == {LARGE: 200.0, TRITON: 196.0}
    assert estimated_us(known, Op.LINEAR_W4A8, 4096, 4096, 1, (LARGE,)) == {}
    assert fastest(known, Op.LINEAR_W4A16, 4096, 4096, 1, (LARGE,)) is None


@pytest.fixture
def own_tables(monkeypatch: pytest.MonkeyPatch) -> list[Table]:
    """What the dispatch finds as its tables; everything is installed."""
    found: list[Table] = []
    monkeypatch.setattr(linears, "tables", lambda: tuple(found))
    monkeypatch.setattr(select, "version", lambda package: "3.9.0")
    monkeypatch.setattr(select, "find_spec", lambda name: object())
    for cached in (select.choose, select.usable, linears.kernel_for):
        cached.cache_clear()
    yield found
    for cached in (select.choose, select.usable, linears.kernel_for):
        cached.cache_clear()


def test_the_dispatch_goes_by_the_table(own_tables: list[Table]) -> None:
    h200 = device((9, 0), "NVIDIA H200")
    own_tables.append(table((9, 0), "NVIDIA H200"))
    assert linears.kernel_for(Op.LINEAR_W4A16, h200, Layout.FRAGMENTS, 4096, 4096, 4) is SMALL
    assert linears.kernel_for(Op.LINEAR_W4A16, h200, Layout.FRAGMENTS, 65536, 8192, 1) is LARGE
    assert linears.kernel_for(Op.LINEAR_W4A16, h200, Layout.FRAGMENTS, 4096, 4096, 100) is LARGE
    assert linears.kernel_for(Op.LINEAR_W4A16, h200, Layout.ROW_MAJOR, 4096, 4096, 1) is TRITON
    assert linears.kernel_for(Op.LINEAR_W4A16, h200, Layout.FRAGMENTS, 4096, 4096, 0) is SMALL


def test_without_a_table_the_first_that_serves(own_tables: list[Table]) -> None:
    h200 = device((9, 0), "NVIDIA H200")
    assert linears.kernel_for(Op.LINEAR_W4A16, h200, Layout.FRAGMENTS, 4096, 4096, 32) is SMALL
    assert linears.kernel_for(Op.LINEAR_W4A16, h200, Layout.FRAGMENTS, 4096, 4096, 33) is LARGE
    assert linears.kernel_for(Op.LINEAR_W4A4, h200, Layout.FRAGMENTS, 4096, 4096, 65) is Kernel.TORCH
    with pytest.raises(linears.FormatError, match="no kernel on NVIDIA H200 reads a weight in the layout cpu"):
        linears.kernel_for(Op.LINEAR_W4A16, h200, Layout.CPU, 4096, 4096, 65)


def test_humming_takes_a_weight_where_it_measures_faster(own_tables: list[Table]) -> None:
    import torch

    weight = row_major(encode(torch.ones(64, 64, dtype=torch.bfloat16), NVFP4))
    a40 = device((8, 6), "NVIDIA A40")
    assert linears.best_layout(Op.LINEAR_W4A16, a40, weight) is Layout.ROW_MAJOR
    slow = Row(Op.LINEAR_W4A16, 64, 64, 1, {TRITON: 10.0, HUMMING: 11.0})
    fast = Row(Op.LINEAR_W4A16, 64, 64, 1, {TRITON: 10.0, HUMMING: 9.0})
    for row, layout in ((slow, Layout.ROW_MAJOR), (fast, Layout.HUMMING)):
        own_tables[:] = [table((8, 6), "NVIDIA A40", (row,))]
        assert linears.best_layout(Op.LINEAR_W4A16, a40, weight) is layout
    half = row_major(encode(torch.ones(64, 64), NVFP4))  # of fp32, which humming does not multiply
    assert linears.best_layout(Op.LINEAR_W4A16, a40, half) is Layout.ROW_MAJOR


def test_the_tables_that_are_shipped_can_be_read() -> None:
    for found in measured.tables():
        assert found.rows
        assert all(us > 0 for row in found.rows for us in row.times_us.values())
