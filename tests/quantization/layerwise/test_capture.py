"""What a layer's sites are given: which tokens teach and which judge, in memory or on disk."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from blockscale.checkpoint.source import open_source
from blockscale.errors import NonFiniteError
from blockscale.quantization.hidden_states import HiddenStates
from blockscale.quantization.layerwise import tokens
from blockscale.quantization.layerwise.capture import (
    Capture,
    SiteInputs,
    capture_stage,
    held_back,
    sample_inputs,
    watching,
)
from blockscale.quantization.layerwise.layer import stages
from blockscale.quantization.layerwise.streams import Streams, probe_layer
from blockscale.quantization.plan import make_plan
from blockscale.quantization.recipe import RECIPES
from blockscale.quantization.sites import Site, find_sites
from blockscale.quantization.walk import Walk, advance, run_until
from blockscale.quantization.windows import Windows

from ..test_walk import begin
from .running import windows

Find = Callable[[str], Path]


def first_layer(path: Path, folder: Path, given: Windows) -> tuple[Walk, HiddenStates, dict[str, Site]]:
    """Sites of layer 0, by their first linear."""
    with torch.no_grad():
        walk, states = begin(path, folder, given)
        few, _ = begin(path, folder / "few", Windows(given.ids[:1]))
        streams = Streams(states, states, few, HiddenStates(folder, "probe"), folder)
        layer = walk.load(0)
        plan = make_plan(open_source(path), RECIPES["nvfp4"])
        sites = find_sites(layer, f"{walk.prefix}.0", plan.linears, *probe_layer(layer, 0, streams))
    return walk, states, {site.hosted[0].rpartition(".")[2]: site for site in sites}


def captured(walk: Walk, states: HiddenStates, site: Site, folder: Path) -> SiteInputs:
    with torch.no_grad():
        return capture_stage(walk, 0, walk.load(0), states, [site], folder / "inputs")[site.name]


def by_window(walk: Walk, states: HiddenStates, site: Site) -> dict[int, Tensor]:
    """Number -> [T, K], each batch run by itself as far as the site."""
    found = {}
    with torch.no_grad():
        for batch, numbers in enumerate(walk.windows.batches):
            x = run_until(walk.load(0), states.read(0, batch), walk.call(0, batch, states), site.hosted[0])
            assert x is not None
            found |= dict(zip(numbers, x, strict=True))
    return found


def both(inputs: SiteInputs) -> tuple[Tensor, Tensor]:
    return torch.cat(list(inputs.train)), torch.cat(list(inputs.held))


@pytest.mark.parametrize("leaf", ["q_proj", "down_proj"])
@pytest.mark.parametrize(
    ("count", "faults", "held"),
    [
        (20, {}, [7, 15]),
        (9, {}, [7]),
        (5, {}, [4]),
        (2, {}, [1]),
        (20, dict.fromkeys((0, 7, 8, 16, 17, 18, 19), "NaN"), [10]),
        (3, {2: "NaN"}, [1]),
    ],
)
def test_whole_windows_judge(
    leaf: str, count: int, faults: Mapping[int, str], held: list[int], tiny_model: Find, tmp_path: Path
) -> None:
    """Of those that are left, whatever their numbers."""
    given = Windows(windows(count), faults)
    walk, states, sites = first_layer(tiny_model("llama"), tmp_path, given)
    inputs = captured(walk, states, sites[leaf], tmp_path)
    expected = by_window(walk, states, sites[leaf])
    train, judged = both(inputs)
    assert held_back(given) == set(held)
    assert torch.equal(judged, torch.cat([expected[n] for n in held]))
    assert torch.equal(train, torch.cat([x for n, x in expected.items() if n not in held]))


def test_of_one_window_every_eighth_token_judges(tiny_model: Find, tmp_path: Path) -> None:
    walk, states, sites = first_layer(tiny_model("llama"), tmp_path, Windows(windows(1, 20)))
    train, held = both(captured(walk, states, sites["q_proj"], tmp_path))
    (x,) = by_window(walk, states, sites["q_proj"]).values()
    assert torch.equal(held, x[[7, 15]])
    assert torch.equal(train, x[[i for i in range(20) if i not in (7, 15)]])


def test_no_more_judge_than_are_needed(tiny_model: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from blockscale.quantization.layerwise import capture

    monkeypatch.setattr(capture, "_HELD_TOKENS", 16)
    walk, states, sites = first_layer(tiny_model("llama"), tmp_path, Windows(windows(16)))
    inputs = captured(walk, states, sites["q_proj"], tmp_path)
    expected = by_window(walk, states, sites["q_proj"])
    assert torch.equal(both(inputs)[1], torch.cat([expected[7][::4], expected[15][::4]])), "an even sample"
    assert len(both(inputs)[0]) == 14 * 32


def test_in_memory_or_on_disk(tiny_model: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walk, states, sites = first_layer(tiny_model("llama"), tmp_path, Windows(windows(20)))
    inside = captured(walk, states, sites["down_proj"], tmp_path / "memory")
    monkeypatch.setattr(tokens, "_CPU_LIMIT_BYTES", 7 * 32 * 96 * 4)  # of the first batch
    outside = captured(walk, states, sites["down_proj"], tmp_path / "disk")
    assert not (tmp_path / "memory").exists()
    files = [p for p in (tmp_path / "disk").rglob("*") if p.is_file()]
    assert len(files) == 2, "the later batches' training tokens"
    for a, b in zip(both(inside), both(outside), strict=True):
        assert torch.equal(a, b)
    outside.clear()
    assert not any(p.is_file() for p in (tmp_path / "disk").rglob("*"))
    assert list(outside.train) == list(outside.held) == []


def test_many_stores_share_the_room() -> None:
    """Experts are captured together, hundreds of them."""
    assert tokens.room_bytes("cpu", 2) == tokens._CPU_LIMIT_BYTES
    assert 1000 * tokens.room_bytes("cpu", 1000) <= tokens._CPU_TOTAL_BYTES


def test_experts_are_captured_together(tiny_model: Find, tmp_path: Path) -> None:
    """All of one projection, in one run of the layer; a token is with the experts that the router chose."""
    walk, states, _ = first_layer(tiny_model("qwen3_moe"), tmp_path, Windows(windows(9)))
    plan = make_plan(open_source(tiny_model("qwen3_moe")), RECIPES["nvfp4"])
    with torch.no_grad():
        few, _ = begin(tiny_model("qwen3_moe"), tmp_path / "few", Windows(windows(1)))
        streams = Streams(states, states, few, HiddenStates(tmp_path, "probe"), tmp_path)
        layer = walk.load(0)
        sites = find_sites(layer, "model.layers.0", plan.linears, *probe_layer(layer, 0, streams))
    found = stages(sites)
    assert [len(stage) for stage in found] == [1, 1, 4, 4]
    assert [stage[0].hosted[0].rpartition(".")[2] for stage in found] == ["q_proj", "o_proj", "gate_proj", "down_proj"]
    assert [site.name for site in found[2]] == [f"model.layers.0.mlp.experts.{i}.gate_proj+up_proj" for i in range(4)]
    with torch.no_grad():
        inputs = capture_stage(walk, 0, layer, states, found[2], tmp_path / "inputs")
    counts = [[len(both(inputs[site.name])[i]) for site in found[2]] for i in range(2)]
    assert sum(counts[0]) + sum(counts[1]) == 2 * 9 * 32, "two experts a token"
    for trained, judged in zip(*counts, strict=True):
        assert judged in (trained // 7, trained // 7 - 1)  # of two batches, each of which may keep a rest


def test_what_the_16_bit_layer_is_given_stands_beside_it(tiny_model: Find, tmp_path: Path) -> None:
    """Token by token, from a run of the whole layer."""
    walk, states, sites = first_layer(tiny_model("llama"), tmp_path, Windows(windows(11)))
    every = list(sites.values())
    capture = Capture(every, walk, tmp_path / "references")
    with torch.no_grad(), capture.listening(layer := walk.load(0)) as watch:
        advance(walk, 0, layer, states, watch)
    for site in every:
        for a, b in zip(both(capture.inputs[site.name]), both(captured(walk, states, site, tmp_path)), strict=True):
            assert torch.equal(a, b)
    assert not any(module._forward_pre_hooks for module in layer.modules()), "no hook is left"


def test_a_sample_is_of_training_tokens(tiny_model: Find, tmp_path: Path) -> None:
    walk, states, sites = first_layer(tiny_model("llama"), tmp_path, Windows(windows(16)))
    with torch.no_grad():
        found = sample_inputs(walk, 0, walk.load(0), states, list(sites.values()), 100)
    for site in sites.values():
        train = {tuple(row.tolist()) for row in both(captured(walk, states, site, tmp_path))[0]}
        rows = [tuple(row.tolist()) for row in found[site.name]]
        assert len(rows) == 112, "about as many as were asked for"
        assert set(rows) <= train


class Twins(nn.Module):
    """Engines fuse `a` and `b`; this model calls `b` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x)


def test_the_linear_that_is_called_speaks_for_its_site() -> None:
    layer, site = Twins(), Site("s", ("a", "b"), ("a", "b"), 4, is_expert=False)
    x = torch.ones(2, 3, 4)
    with watching(layer, [site]) as seen:
        layer(x)
        layer.a(x)
    assert [len(calls) for calls in seen.values()] == [1]
    with watching(layer, [site]) as seen, pytest.raises(NonFiniteError, match="the input of s holds NaN or Inf"):
        layer(x / 0)
