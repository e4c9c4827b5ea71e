"""Every family on a GPU against the same decoder on the CPU: prompts whole, in pieces, by tokens; all cache formats."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockscale import api
from blockscale.kernels.paged_cache import KVFormat
from blockscale.models.batch import Batch
from blockscale.models.decoder import Decoder
from blockscale.models.load import load_decoder
from tests.models.running import NUM_TOKENS, PIECES, batch_of, relative, run, tokens
from tests.models.test_families import FAMILIES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIXTEEN_BITS = 16 * torch.finfo(torch.bfloat16).eps
CACHE = {KVFormat.BITS16: 1.0, KVFormat.FP8: 2.0, KVFormat.NVFP4: 6.0}  # how much coarser than SIXTEEN_BITS


def on_gpu(batch: Batch) -> Batch:
    moved = {f.name: getattr(batch, f.name).cuda() for f in fields(Batch) if isinstance(getattr(batch, f.name), Tensor)}
    return replace(batch, **moved)


def run_on_gpu(decoder: Decoder, ids: Tensor, pieces: Sequence[int] = (NUM_TOKENS,)) -> Tensor:
    """fp32 [T, V] on the CPU: logits of one sequence given in pieces, on pages that do not follow one another."""
    caches, table = decoder.allocate(5, 16), torch.tensor([[3, 1]], dtype=torch.int32)
    out, begin = [], 0
    for count in pieces:
        hidden = decoder.forward(on_gpu(batch_of([ids[begin : begin + count]], [begin], table)), caches)
        out.append(decoder.logits(hidden).cpu())
        begin += count
    return torch.cat(out)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_cpu(family: str, tiny_model: Callable[[str], Path]) -> None:
    path, ids = tiny_model(family), tokens()
    expected = run(load_decoder(path), ids)
    decoder = load_decoder(path, device="cuda")
    for pieces in PIECES:
        assert relative(run_on_gpu(decoder, ids, pieces), expected) < SIXTEEN_BITS


@pytest.mark.parametrize("fmt", list(KVFormat))
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gpt_oss"])
def test_four_bit_weights_and_every_cache(
    family: str, fmt: KVFormat, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    out, ids = tmp_path / "out", tokens()
    api.quantize(tiny_model(family), out, "nvfp4-w4a16")
    expected = run(load_decoder(out), ids)
    decoder = load_decoder(out, device="cuda", kv_format=fmt)
    for pieces in PIECES:
        assert relative(run_on_gpu(decoder, ids, pieces), expected) < CACHE[fmt] * SIXTEEN_BITS


def test_loading_takes_hardly_more_than_the_checkpoint(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    from blockscale.engine.bench.random_model import random_config, write_hollow

    config = {**random_config("llama-3.1-8b"), "num_hidden_layers": 2}
    write_hollow(tmp_path, config)
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    decoder = load_decoder(tmp_path, device="cuda")
    assert decoder.layers
    assert torch.cuda.max_memory_allocated() - before < 1.15 * size
