"""A 16-bit model far larger than memory is quantized in the memory of a few of its tensors."""

import shutil
from pathlib import Path

import pytest
from faults.fresh import run_fresh
from faults.giants import SHARD_BYTES, llama_16_bit
from faults.raw import INDEX, read_json, shards

NUM_LAYERS = 23  # 39.3 GB in bf16
FREE_BYTES = 20 * 10**9
MAX_SHARDS = 2.5


@pytest.mark.slow
def test_forty_gigabytes_in_the_memory_of_two_and_a_half_shards(tmp_path: Path) -> None:
    """Its input is sparse, the output is not: a quarter of its size is written."""
    free = shutil.disk_usage(tmp_path).free
    if free < FREE_BYTES:
        pytest.skip(f"{free / 1e9:.0f} GB of disk are free, {FREE_BYTES / 1e9:.0f} are needed")
    source, out = llama_16_bit(tmp_path / "model", NUM_LAYERS), tmp_path / "out"
    try:
        total = read_json(source / INDEX)["metadata"]["total_size"]
        assert 39e9 < total < 41e9
        assert len(shards(source)) >= 8
        code = f"from blockscale import api\nresult = len(api.quantize({str(source)!r}, {str(out)!r}, 'nvfp4').layers)"
        done = run_fresh(code)
        assert done.result == 7 * NUM_LAYERS
        written = sum(file.stat().st_size for file in shards(out))
        assert written == pytest.approx(total * 4.5 / 16, rel=0.01)
        assert done.peak_mb * 1e6 < MAX_SHARDS * SHARD_BYTES
        print(f"peak {done.peak_mb:.0f} MB, {total / 1e9:.1f} GB in, {written / 1e9:.1f} GB out")
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)
