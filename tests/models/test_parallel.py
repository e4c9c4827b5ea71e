"""Models divided among several ranks, against the same model on one: every family, every stored format."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families.published import with_mxfp4_experts
from faults.fresh import run_fresh
from tiny_configs import tiny_config
from torch import Tensor

from blockscale import api
from blockscale.engine.bench.random_model import random_config, write_hollow
from blockscale.errors import UsageError
from blockscale.kernels.paged_cache import KVFormat
from blockscale.models.batch import Batch
from blockscale.models.config import read_config
from blockscale.models.decoder import Decoder
from blockscale.models.load import load_decoder
from blockscale.models.shard import Shard, check_parts, of_rank

from .ranks import decoders, on_ranks
from .running import PAGE, batch_of, relative, run, tokens

PIECES = (22, 1, 1)
FP32 = 2e-5  # sums in another order, as in test_families
CACHE = 1e-3  # a key or value between two bfloat16 may fall to either side
KNIFE_EDGE = 0.02  # rounded inputs: sums in another order move a few of them to the next code
Tiny = Callable[[str], Path]


def compare(path: Path, size: int, bound: float, **options: Any) -> None:
    """Every rank has the logits of one device, and they are the same on all, bit for bit."""
    alone = load_decoder(path, **options)
    ids = tokens(alone.vocab_size)
    expected = run(alone, ids, PIECES)
    found = decoders(path, size, lambda decoder: run(decoder, ids, PIECES), **options)
    assert relative(found[0], expected) < bound
    for other in found[1:]:
        assert torch.equal(other, found[0])


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", (2, 4)),  # of four ranks two have the same keys and values
        ("smollm2", (4,)),  # one head of keys and values; the embedding is the head
        ("qwen2", (2,)),  # biases
        ("phi3", (2,)),  # fused projections
        ("gemma3_text", (2,)),
        ("mixtral", (4,)),  # 96 wide: parts of 32, 32, 16 and 16
        ("qwen3_moe", (2,)),
        ("gpt_oss", (2, 4)),  # biases of experts, interleaved rows, sinks
    ],
)
def test_families(family: str, sizes: tuple[int, ...], tiny_model: Tiny) -> None:
    for size in sizes:
        compare(tiny_model(family), size, CACHE)


@pytest.mark.parametrize(
    "name",
    [
        "ct_llama_fp8_dynamic",
        "ct_llama_mxfp4",
        "ct_llama_nvfp4",
        "modelopt_llama_mixed_fp8attn_nvfp4mlp_fp8kv",
        "modelopt_llama_nvfp4_awq_lite",
        "modelopt_llama_w4a16_nvfp4",
        "modelopt_llama_w4a8_nvfp4_fp8",
        "modelopt_qwen3moe_nvfp4",
    ],
)
def test_stored_formats(name: str, golden_checkpoint: Tiny) -> None:
    compare(golden_checkpoint(name), 2, CACHE, kv_format=KVFormat.BITS16)


def test_small_caches_and_more_ranks_than_key_heads(golden_checkpoint: Tiny) -> None:
    path = golden_checkpoint("modelopt_llama_nvfp4")
    compare(path, 4, CACHE, kv_format=KVFormat.BITS16)
    compare(path, 2, KNIFE_EDGE, kv_format=KVFormat.FP8)


@pytest.mark.parametrize("name", ["modelopt_llama_nvfp4", "modelopt_llama_fp8", "modelopt_qwen3moe_nvfp4"])
def test_rounded_inputs(name: str, golden_checkpoint: Tiny) -> None:
    compare(golden_checkpoint(name), 2, KNIFE_EDGE, kv_format=KVFormat.BITS16, emulate_activations=True)


@pytest.mark.parametrize("method", ["nvfp4-svdquant", "nvfp4-best-arc"])
def test_branches(method: str, tiny_model: Tiny, calibration_text: Path, tmp_path: Path) -> None:
    out = tmp_path / "q"
    api.quantize(tiny_model("llama"), out, method, calibration=[calibration_text], max_calibration_tokens=512)
    compare(out, 2, CACHE)
    if method == "nvfp4-best-arc":
        with pytest.raises(UsageError, match="corrected channels of its inputs share blocks"):
            load_decoder(out, shard=Shard(0, 2), emulate_activations=True)


def test_published_mxfp4_experts(tiny_model: Tiny, tmp_path: Path) -> None:
    path = with_mxfp4_experts(tiny_model("gpt_oss"), tmp_path / "model")
    compare(path, 2, CACHE)
    with pytest.raises(UsageError, match=r"columns 0 to 16 of 64 cut mxfp4's blocks of 32"):
        load_decoder(path, shard=Shard(0, 4))


@pytest.mark.parametrize("recipe", [None, "nvfp4-w4a16"])
def test_deepseek(recipe: str | None, tmp_path: Path) -> None:
    """Heads are divided, the latent is on every rank; a dense layer, experts and what all tokens share."""
    import transformers

    sizes = tiny_config("deepseek_v3").to_dict() | {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "head_dim": 32}
    torch.manual_seed(2)
    config = type(tiny_config("deepseek_v3"))(**sizes)
    model = transformers.DeepseekV3ForCausalLM._from_config(config, dtype=torch.float16)
    with torch.no_grad():
        for tensor in model.parameters():
            drawn = torch.randn(tensor.shape)
            tensor.copy_(drawn * 0.12 if tensor.dim() > 1 else 1 + drawn * 0.1)
    path = tmp_path / "deepseek"
    model.save_pretrained(path)
    if recipe:
        api.quantize(path, tmp_path / "q", recipe)
        path = tmp_path / "q"
    ids, table = tokens(), torch.tensor([[3, 1]], dtype=torch.int32)

    def logits(decoder: Decoder) -> Tensor:
        caches, out, begin = decoder.allocate(4, PAGE), [], 0
        for count in PIECES:
            hidden = decoder.forward(batch_of([ids[begin : begin + count]], [begin], table), caches)
            out.append(decoder.logits(hidden))
            begin += count
        return torch.cat(out)

    expected = logits(load_decoder(path, dtype=torch.float16))
    for found in decoders(path, 2, logits, dtype=torch.float16):
        assert relative(found, expected) < 20 * 2.0**-11  # roundings to fp16 on the way, of partial sums as well
    own = decoders(path, 2, lambda decoder: decoder.page_bytes(PAGE), dtype=torch.float16)
    assert own == [load_decoder(path, dtype=torch.float16).page_bytes(PAGE)] * 2


def test_parts_of_a_layer_sum_to_the_whole(tiny_model: Tiny, golden_checkpoint: Tiny) -> None:
    """Without a group a rank gives its part of the sum: attention aside, layer by layer."""
    cases = ((tiny_model("gpt_oss"), 4, 64), (golden_checkpoint("modelopt_llama_nvfp4"), 2, 64))
    for path, size, hidden in cases:
        x = torch.randn(5, hidden, generator=torch.Generator().manual_seed(0))
        whole: Any = load_decoder(path).layers[1]
        parts: list[Any] = [load_decoder(path, shard=Shard(rank, size)).layers[1] for rank in range(size)]
        total = sum(part.feed_forward(x) for part in parts)
        assert relative(total, whole.feed_forward(x)) < FP32
        assert relative(parts[0].feed_forward(x), whole.feed_forward(x)) > 0.1, "one part is the whole"
        wide = torch.randn(5, whole.attention.num_heads * whole.attention.head_dim)
        summed = sum(part.attention.o(p) for part, p in zip(parts, wide.chunk(size, dim=1), strict=True))
        assert relative(summed, whole.attention.o(wide)) < FP32


def test_each_rank_holds_a_part(golden_checkpoint: Tiny) -> None:
    path = golden_checkpoint("modelopt_llama_nvfp4")
    found = decoders(path, 2, lambda d: (d.embedding.shape[0], d.config.num_heads, d.config.num_kv_heads, d.identity))
    assert {part[:3] for part in found} == {(128, 2, 1)}
    assert found[0][3] == found[1][3] != load_decoder(path).identity


_CODE = """
from pathlib import Path
import torch
torch.set_num_threads(1)
from blockscale.models.load import load_decoder
from blockscale.models.shard import Shard
load_decoder(Path({tiny!r}))
status = Path("/proc/self/status").read_text()
result = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) * 1024 / 1e6
decoder = load_decoder(Path({path!r}), shard=Shard({rank}, 2))
"""


def test_memory_while_a_part_is_loaded(golden_checkpoint: Tiny, tmp_path: Path) -> None:
    """Never 1.15 times the part: the other part is not read on the way."""
    config = random_config("tiny") | {"hidden_size": 1024, "head_dim": 64, "num_attention_heads": 16}
    config |= {"intermediate_size": 3072, "num_hidden_layers": 20, "num_key_value_heads": 4, "vocab_size": 4096}
    write_hollow(tmp_path, config)
    tiny = str(golden_checkpoint("modelopt_llama_nvfp4"))
    part_mb = (tmp_path / "model.safetensors").stat().st_size / 1e6 / 2
    done = run_fresh(_CODE.format(tiny=tiny, path=str(tmp_path), rank=1))
    taken = done.peak_mb - done.result
    assert 0.9 * part_mb < taken < 1.15 * part_mb + 8, f"{taken:.0f} MB for a part of {part_mb:.0f} MB"


def test_a_vocabulary_that_does_not_divide(tiny_model: Tiny, tmp_path: Path) -> None:
    """The last rank lacks two tokens."""
    from safetensors.torch import load_file, save_file

    path = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": 126}))
    tensors = load_file(path / "model.safetensors")
    cut = {name: tensor[:126].clone() if tensor.shape[0] == 128 else tensor for name, tensor in tensors.items()}
    save_file(cut, path / "model.safetensors", metadata={"format": "pt"})
    compare(path, 4, CACHE)


@pytest.mark.parametrize(
    ("change", "size", "what"),
    [
        ({}, 3, "4 of the model \\(query heads\\)"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4, "6 of the model \\(key and value heads\\)"),
        ({"intermediate_size": 40}, 2, "40 of the model \\(width of feed-forward layers\\)"),
        ({"intermediate_size": 16}, 2, "16 of the model \\(width of feed-forward layers\\)"),
    ],
)
def test_what_cannot_be_cut_is_refused(change: dict[str, Any], size: int, what: str, tiny_model: Tiny) -> None:
    config = json.loads((tiny_model("llama") / "config.json").read_text())
    with pytest.raises(UsageError, match=what) as caught:
        check_parts(read_config(config | change), size)
    assert "tensor_parallel" in caught.value.hint


def test_cuts_cover_every_dimension_once(tiny_model: Tiny) -> None:
    for size in (1, 2, 3, 4, 8):
        shards = [Shard(rank, size) for rank in range(size)]
        for parts in (
            [shard.width("inner", 2880) for shard in shards],
            [shard.width("inner", 14336) for shard in shards],
            [shard.vocabulary(128_259) for shard in shards],
            [shard.heads(24) for shard in shards],
        ):
            assert parts[0].begin == 0
            assert [part.end for part in parts[:-1]] == [part.begin for part in parts[1:]]
            assert parts[-1].end == parts[-1].whole
    assert [Shard(rank, 4).width("inner", 2880).size for rank in range(4)] == [736, 736, 704, 704]
    assert [Shard(rank, 4).kv_heads(2).begin for rank in range(4)] == [0, 0, 1, 1]
    own = of_rank(read_config(json.loads((tiny_model("llama") / "config.json").read_text())), Shard(3, 4))
    assert (own.num_heads, own.num_kv_heads) == (1, 1)


def test_a_group_sums_gathers_and_hands_out() -> None:
    def work(group: Any) -> tuple[Tensor, Tensor, Tensor]:
        rank = group.shard.rank
        x = torch.full((2, 3), float(rank + 1), dtype=torch.bfloat16)
        return group.sum(x.t()), group.beside(x), group.from_first(x.clone())

    for total, beside, first in on_ranks(3, work):
        assert total.tolist() == [[6.0] * 2] * 3
        assert beside.tolist() == [[1.0] * 3 + [2.0] * 3 + [3.0] * 3] * 2
        assert first.tolist() == [[1.0] * 3] * 2


def test_sequences_side_by_side(tiny_model: Tiny) -> None:
    """A mixed batch on two ranks: prompts and single tokens."""
    path = tiny_model("llama")
    prompts = [tokens(seed=seed, count=count) for seed, count in ((1, 20), (2, 5))]
    table = torch.tensor([[6, 2], [4, 0]], dtype=torch.int32)

    def steps(decoder: Decoder) -> Tensor:
        caches = decoder.allocate(8, PAGE)
        first: Batch = batch_of([prompts[0][:19], prompts[1][:2]], (0, 0), table)
        decoder.forward(first, caches)
        return decoder.logits(decoder.forward(batch_of([prompts[0][19:], prompts[1][2:]], (19, 2), table), caches))

    expected = steps(load_decoder(path))
    for found in decoders(path, 2, steps):
        assert relative(found, expected) < CACHE
