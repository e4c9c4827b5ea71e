"""Whole layers of experts, from the folder to the result, against the modules of transformers."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blockscale import api
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.errors import ModelError
from blockscale.host.model import load_model
from blockscale.models import moe
from blockscale.models.moe_config import read_latent, read_moe

from .test_experts import BOUND, CPU, DTYPE, fp32_linear, relative

PLACES = {"mixtral": "block_sparse_moe"}
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")


def config_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", [None, "nvfp4-w4a16"])
@pytest.mark.parametrize("has_kernel", [True, False])
def test_a_layer(
    family: str,
    recipe: str | None,
    has_kernel: bool,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tiny_model(family)
    if recipe:
        path = tmp_path / "model"
        api.quantize(tiny_model(family), path, recipe)
    monkeypatch.setattr(moe, "has_kernel", lambda device: has_kernel)
    checkpoint, config = open_checkpoint(path), read_moe(config_of(path))
    assert config is not None
    assert 1 in config.layers
    theirs: Any = load_model(path, emulate_activations=False).model.get_submodule("model.layers.1.mlp")
    prefix = f"model.layers.1.{PLACES.get(family, 'mlp')}"
    shared = (lambda x: theirs.shared_experts(x.float()).to(x.dtype)) if config.shared_inner else None
    options: dict[str, Any] = {"device": CPU, "dtype": DTYPE, "is_emulating": False, "shared": shared}
    layer = moe.load_moe(checkpoint, prefix, config, 64, fp32_linear, **options)
    x = torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(6)).to(DTYPE)
    with torch.inference_mode():
        expected = theirs(x.float())
        found = layer(x[0])
    expected = (expected[0] if isinstance(expected, tuple) else expected)[0]
    # the router's logits and weights are rounded to fp16 as well
    assert relative(found, expected) < 2 * BOUND


def test_which_layers_have_experts(tiny_model: Callable[[str], Path]) -> None:
    deepseek = read_moe(config_of(tiny_model("deepseek_v3")))
    assert deepseek is not None
    assert deepseek.layers == {1}
    qwen = {**config_of(tiny_model("qwen3_moe")), "num_hidden_layers": 6}
    sparse = read_moe({**qwen, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert sparse is not None
    assert sparse.layers == {1, 5}
    assert read_moe({"model_type": "llama"}) is None
    assert read_latent(qwen) is None


def test_configs_that_cannot_be_are_refused(tiny_model: Callable[[str], Path]) -> None:
    config = config_of(tiny_model("deepseek_v3"))
    for change, message in (
        ({"num_experts_per_tok": 9}, "9 of 8 experts"),
        ({"n_group": 3}, "groups of 8 experts"),
        ({"topk_group": 5}, "5 of 2 groups"),
        ({"n_routed_experts": "many"}, "cannot be read"),
    ):
        with pytest.raises(ModelError, match=message):
            read_moe({**config, **change})
    del config["kv_lora_rank"], config["moe_intermediate_size"]
    with pytest.raises(ModelError, match="has no 'kv_lora_rank'"):
        read_latent(config)
    with pytest.raises(ModelError, match="has no 'moe_intermediate_size'"):
        read_moe(config)


def test_yarn_makes_logits_larger(tiny_model: Callable[[str], Path]) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    config = config_of(tiny_model("deepseek_v3"))
    rope = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    plain, scaled = read_latent(config), read_latent({**config, "rope_parameters": rope})
    assert plain is not None
    assert scaled is not None
    assert plain.scale == 1 / math.sqrt(32)
    assert math.isclose(scaled.scale, yarn_apply_mscale(rope, plain.scale))
    assert scaled.scale > plain.scale


def test_a_router_of_another_model_is_refused(tiny_model: Callable[[str], Path]) -> None:
    path = tiny_model("mixtral")
    checkpoint, config = open_checkpoint(path), read_moe(config_of(path))
    assert config is not None
    with pytest.raises(ModelError, match=r"gate\.weight: the checkpoint has \[4, 64\], the model \[4, 32\]"):
        moe.load_router(checkpoint, "model.layers.0.block_sparse_moe", config, 32, device=CPU, dtype=DTYPE)
    with pytest.raises(ModelError, match="no such tensor"):
        moe.load_router(checkpoint, "model.layers.0.mlp", config, 64, device=CPU, dtype=DTYPE)
