"""The walk through the decoder against transformers' own forward pass."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_configs import _SIZES, VOCABULARY, config_class
from torch import Tensor, nn

from blockscale import api
from blockscale.checkpoint.header import TensorInfo
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.errors import NonFiniteError
from blockscale.host.linear import KeptLinear, PackedLinear
from blockscale.host.skeleton import build_skeleton, load_config
from blockscale.host.weights import host_weights
from blockscale.quantization import walk as walk_module
from blockscale.quantization.hidden_states import HiddenStates
from blockscale.quantization.walk import Walk, advance, discard_arguments, record_calls, run_layer, run_until
from blockscale.quantization.windows import Windows

Find = Callable[[str], Path]


def ids(count: int = 11, length: int = 32) -> Tensor:
    """Two batches, the second smaller."""
    return torch.randint(VOCABULARY, (count, length), generator=torch.Generator().manual_seed(4))


def begin(
    path: Path, folder: Path, windows: Windows | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Walk, HiddenStates]:
    checkpoint = open_checkpoint(path)
    model = build_skeleton(load_config(path), dtype)
    weights = host_weights(model, checkpoint, is_emulating=False)
    states = HiddenStates(folder, "hidden")
    return record_calls(model, weights, windows or Windows(ids()), folder, states=states), states


def inputs_of(path: Path, tokens: Tensor, names: list[str]) -> dict[str, Tensor]:
    """First argument of each module's first call, by hooks in the whole model."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    seen: dict[str, Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            seen.setdefault(name, args[0] if args else next(iter(kwargs.values())))

        return hook

    for name in names:
        model.get_submodule(name).register_forward_pre_hook(note(name), with_kwargs=True)
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    return seen


def small_model(folder: Path, family: str, **changes: Any) -> Path:
    import transformers

    torch.manual_seed(0)
    config = config_class(family)(**{**_SIZES, **changes})
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


FAMILIES = ["llama", "gemma3_text", "gemma4_text", "qwen3", "phi3", "qwen3_moe", "deepseek_v3", "bamba", "jamba"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_generation_is_what_the_model_has_there(family: str, tiny_model: Find, tmp_path: Path) -> None:
    path = tiny_model(family)
    with torch.no_grad():
        walk, states = begin(path, tmp_path)
        for index in range(len(walk.layers)):
            assert advance(walk, index, walk.load(index), states) is walk
    decoder = walk.prefix.rpartition(".")[0]
    last = len(walk.layers)
    final_norm = next(n for n, _ in walk.model.get_submodule(decoder).named_children() if "norm" in n)
    names = [f"{walk.prefix}.{index}" for index in range(last)] + [f"{decoder}.{final_norm}"]
    for batch, tokens in enumerate(ids().split(8)):
        expected = inputs_of(path, tokens, names)
        for generation, name in enumerate(names):
            found = states.read(generation, batch)
            torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-4 * expected[name].abs().max().item())


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("llama", ["self_attn", "self_attn.q_proj", "self_attn.o_proj", "mlp", "mlp.up_proj", "mlp.down_proj"]),
        ("gemma3_text", ["self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"]),
        ("qwen3", ["self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"]),
        ("phi3", ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]),
    ],
)
def test_the_input_of_a_module(family: str, modules: list[str], tiny_model: Find, tmp_path: Path) -> None:
    path = tiny_model(family)
    with torch.no_grad():
        walk, states = begin(path, tmp_path)
        advance(walk, 0, walk.load(0), states)
        layer, hidden, call = walk.load(1), states.read(1, 0), walk.call(1, 0, states)
        found = {name: run_until(layer, hidden, call, name) for name in modules}
        whole = run_layer(layer, hidden, call)
    expected = inputs_of(path, ids()[:8], [f"{walk.prefix}.1.{name}" for name in modules])
    for name in modules:
        assert found[name] is not None
        torch.testing.assert_close(found[name], expected[f"{walk.prefix}.1.{name}"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole, run_layer(layer, hidden, walk.call(1, 0, states)), rtol=0, atol=0)


def test_a_layer_stops_at_the_module(tiny_model: Find, tmp_path: Path) -> None:
    """What comes after it is not run, whether linears are kept or packed."""
    api.quantize(tiny_model("llama"), tmp_path / "packed", "nvfp4-w4a16")
    for path, kind in ((tiny_model("llama"), KeptLinear), (tmp_path / "packed", PackedLinear)):
        with torch.no_grad():
            walk, states = begin(path, tmp_path / kind.__name__)
            layer = walk.load(0)
            called: list[str] = []
            for name, module in layer.named_modules():
                if isinstance(module, KeptLinear | PackedLinear):
                    module.register_forward_pre_hook(lambda *_, name=name, called=called: called.append(name))
            x = run_until(layer, states.read(0, 0), walk.call(0, 0, states), "self_attn.o_proj")
        assert isinstance(layer.get_submodule("self_attn.o_proj"), kind)
        assert x is not None
        assert x.shape == (8, 32, 64)
        assert called == ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
        hooks = [hook for module in layer.modules() for hook in module._forward_pre_hooks]
        assert len(hooks) == 7, "only this test's are left"


def test_an_expert_that_no_token_reaches_has_no_input(golden_checkpoint: Find, tmp_path: Path) -> None:
    with torch.no_grad():
        walk, states = begin(golden_checkpoint("base_qwen3moe"), tmp_path, Windows(torch.full((1, 32), 7)))
        layer, hidden, call = walk.load(0), states.read(0, 0), walk.call(0, 0, states)
        inputs = [run_until(layer, hidden, call, f"mlp.experts.{expert}.up_proj") for expert in range(4)]
    assert any(x is None for x in inputs)
    assert [x.shape[1] for x in inputs if x is not None]


def test_a_layer_that_gives_nan_is_named() -> None:
    class Layer(nn.Module):
        def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
            return hidden / hidden, None

    with pytest.raises(NonFiniteError, match="the output of decoder layer 7 holds NaN or Inf"):
        run_layer(Layer(), torch.zeros(1, 2, 3), ((), {}), "decoder layer 7")
    assert run_layer(Layer(), torch.ones(1, 2, 3), ((), {})).tolist() == [[[1.0] * 3] * 2]


def test_only_equal_arguments_are_shared(tmp_path: Path) -> None:
    """A layer's arguments may depend on the batch; what does not is held once, and what does lies on disk."""
    mask, rotary = torch.ones(1, 4), (torch.zeros(4), torch.ones(4))
    first = ((mask,), {"rotary": rotary, "per_layer": torch.zeros(2, 4), "flag": None})
    other = torch.full((4,), 2.0)
    second = (
        (mask.clone(),),
        {"rotary": (rotary[0].clone(), other), "per_layer": torch.ones(2, 4), "flag": None, "same": other},
    )
    smaller = ((torch.ones(1, 3),), {"rotary": rotary, "per_layer": torch.zeros(1, 4), "flag": None})
    arguments = walk_module._Arguments(tmp_path / "arguments")
    for call in (first, second, smaller):
        arguments.add([call])
    held = [batch[0] for batch in arguments.batches]
    assert held[1][0][0] is mask
    assert held[1][1]["rotary"][0] is rotary[0]
    assert isinstance(held[1][1]["rotary"][1], TensorInfo)
    assert held[1][1]["same"] == held[1][1]["rotary"][1], "one tensor is stored once"
    assert held[2][1]["rotary"] == rotary
    found = [walk_module._fetched(call, HiddenStates(tmp_path, "x"), (), "cpu") for call in held]
    assert found[1][1]["rotary"][1].tolist() == [2.0] * 4
    assert found[1][1]["per_layer"].tolist() == [[1.0] * 4] * 2
    assert found[2][0][0].shape == (1, 3)
    assert found[2][1]["per_layer"].shape == (1, 4)
    assert found[2][1]["flag"] is None


def test_arguments_of_every_layer_and_batch_do_not_stay_in_memory(tiny_model: Find, tmp_path: Path) -> None:
    """Inputs per layer, as many as hidden states."""
    with torch.no_grad():
        walk, states = begin(tiny_model("gemma4_text"), tmp_path)
    for layer, (first, second) in enumerate(walk.arguments):
        assert isinstance(first[0][0], Tensor)
        assert isinstance(second[0][0], TensorInfo)
        fetched = walk.call(layer, 1, states)[0][0]
        assert fetched.shape[:2] == (3, 32)
    discard_arguments(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["hidden"]


SHARING = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}


def test_layers_that_share_keys_and_values(tmp_path: Path) -> None:
    """What the second layer leaves, the fourth finds, in another run too."""
    path = small_model(tmp_path / "model", "gemma4_text", **SHARING)
    with torch.no_grad():
        walk, states = begin(path, tmp_path / "work")
        for index in range(2):
            walk = advance(walk, index, walk.load(index), states)
        walk, _ = begin(path, tmp_path / "work")
        for index in range(2, 4):
            walk = advance(walk, index, walk.load(index), states)
    for batch, tokens in enumerate(ids().split(8)):
        expected = inputs_of(path, tokens, ["model.norm"])["model.norm"]
        torch.testing.assert_close(states.read(4, batch), expected, rtol=1e-4, atol=1e-4)
