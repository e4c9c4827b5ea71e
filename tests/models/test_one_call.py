"""A step in one call gives the bits that its layers give one by one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from blockscale import api
from blockscale.kernels.cpu.library import library
from blockscale.kernels.paged_cache import KVFormat
from blockscale.models import attention
from blockscale.models import decoder as models_decoder
from blockscale.models.load import load_decoder

from .running import batch_of, relative, run, tokens

NUM, STEPS = 3, 6
pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        *((family, None) for family in ("llama", "smollm2", "mistral", "qwen2", "qwen3", "phi3")),
        ("llama", "nvfp4-w4a16"),
        ("qwen3", "nvfp4-w4a16"),
        ("qwen3", "mxfp4"),
    ],
)
def test_the_same_bits(family: str, recipe: str | None, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    path = tiny_model(family)
    if recipe is not None:
        api.quantize(path, tmp_path / "made", recipe)
        path = tmp_path / "made"
    decoder = load_decoder(path)
    assert decoder._layers_at_once is not None, "nothing is compared"
    prompts = [tokens(seed=seed, count=20) for seed in range(NUM)]
    table = torch.arange(2 * NUM, dtype=torch.int32).view(NUM, 2)

    def steps(*, at_once: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        if not at_once:
            vars(decoder)["_layers_at_once"] = None
        caches = decoder.allocate(2 * NUM, 16)
        first, second = 20 - STEPS - 5, 20 - STEPS
        out = [decoder.forward(batch_of([p[:first] for p in prompts], [0] * NUM, table), caches)]
        # a piece of one beside a token of another
        mixed = [prompts[0][first:second], prompts[1][first : first + 1], prompts[2][first:second]]
        out.append(decoder.forward(batch_of(mixed, [first] * NUM, table), caches))
        rest = prompts[1][first + 1 : second]
        out.append(decoder.forward(batch_of([rest], [first + 1], table[1:2]), caches))
        for i in range(second, 20):
            out.append(decoder.forward(batch_of([p[i : i + 1] for p in prompts], [i] * NUM, table), caches))
        return torch.cat(out), [side for cache in caches for side in (cache.k, cache.v)]

    together, pages = steps(at_once=True)
    apart, other_pages = steps(at_once=False)
    assert torch.equal(together, apart)
    for one, other in zip(pages, other_pages, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("family", ["gemma3_text", "mixtral", "gpt_oss"])
def test_other_layers_go_one_by_one(family: str, tiny_model: Callable[[str], Path]) -> None:
    assert load_decoder(tiny_model(family))._layers_at_once is None


def test_a_cache_that_the_call_does_not_write(tiny_model: Callable[[str], Path]) -> None:
    decoder = load_decoder(tiny_model("llama"), kv_format=KVFormat.FP8)
    caches, table = decoder.allocate(2, 16), torch.tensor([[0, 1]], dtype=torch.int32)
    hidden = decoder.forward(batch_of([tokens()[:1]], [0], table), caches)
    assert hidden.isfinite().all()


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "qwen3"])
def test_a_prompt_in_one_piece_gives_the_bits_of_single_tokens(family: str, tiny_model: Callable[[str], Path]) -> None:
    """Short ones: each query is computed by itself."""
    decoder, ids = load_decoder(tiny_model(family)), tokens(count=24)
    assert torch.equal(run(decoder, ids), run(decoder, ids, [1] * 24))


def test_a_long_prompt_goes_to_torch_and_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[[str], Path]
) -> None:
    decoder, ids = load_decoder(tiny_model("mistral")), tokens(count=24)
    expected = run(decoder, ids)
    monkeypatch.setattr(attention, "_FEW", 23)
    monkeypatch.setattr(models_decoder, "_MOST_ATTENDED", 23)
    found = run(decoder, ids)
    assert not torch.equal(found, expected), "the same way was taken"
    assert relative(found, expected) < 1e-3
