"""Shared fixtures: golden checkpoints, a tiny tokenizer, tiny random models and hand-written model folders."""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the hub for anything; read when huggingface_hub is imported

GOLDEN = Path(__file__).parent / "golden"
VOCABULARY = 128  # of the tiny models and of the tokenizer: one token an ASCII character


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run tests marked slow as well")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # tensors of a few thousand elements gain nothing from more


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def golden_checkpoint() -> Callable[[str], Path]:
    """Name -> folder of a checkpoint in tests/golden/checkpoints. Read only: copy it before changing it."""

    def find(name: str) -> Path:
        folder = GOLDEN / "checkpoints" / name
        assert folder.is_dir(), f"golden checkpoint {name} is missing"
        return folder

    return find


def add_tokenizer(folder: Path) -> Path:
    """Writes a tokenizer of one token a character: ids are ASCII codes, `?` stands for the rest."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({chr(i): i for i in range(VOCABULARY)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "?", "model_max_length": 1_000_000}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def with_tokenizer(
    tmp_path_factory: pytest.TempPathFactory, golden_checkpoint: Callable[[str], Path]
) -> Callable[[str], Path]:
    """Name -> a copy of a golden checkpoint that has a tokenizer. Read only."""
    made: dict[str, Path] = {}

    def copy(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name) / name
            shutil.copytree(golden_checkpoint(name), folder)
            made[name] = add_tokenizer(folder)
        return made[name]

    return copy


@pytest.fixture(scope="session")
def calibration_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 6000 characters, all of them in the tiny tokenizer's vocabulary."""
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(32, 127, (6000,), generator=generator).tolist()
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("".join(map(chr, codes)))
    return path


WriteModel = Callable[..., Path]


@pytest.fixture
def write_model(tmp_path: Path) -> WriteModel:
    """(config, shards, name="model") -> a model folder; more than one shard gets an index."""

    def write(config: Mapping[str, Any], shards: Sequence[Mapping[str, Tensor]], name: str = "model") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(dict(config)))
        if len(shards) == 1:
            save_file(dict(shards[0]), folder / "model.safetensors", metadata={"format": "pt"})
            return folder
        weight_map = {}
        for i, shard in enumerate(shards, 1):
            file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            save_file(dict(shard), folder / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(shard, file))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder

    return write


def _auto_class(family: str) -> Any:
    """The transformers class that builds a model type: language models, and those that see images too."""
    import transformers

    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    kinds = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    return next(kind for kind in kinds if config in kind._model_mapping)


def _tiny_config(family: str) -> Any:
    """A config of two layers and a hidden size of 64, by model type."""
    import transformers

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    mla = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    deepseek = {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    }
    own: dict[str, dict[str, Any]] = {
        "llama": {},
        "mixtral": experts,
        "gemma3_text": {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "gemma4_text": {"head_dim": 16, "global_head_dim": 16, "vocab_size_per_layer_input": VOCABULARY},
        "qwen2": {"tie_word_embeddings": True},
        "qwen3": {"head_dim": 16},
        "phi3": {},
        "phimoe": experts,
        "llama4_text": {"head_dim": 16, "intermediate_size_mlp": 96, **experts},
        "deepseek_v3": {**mla, **deepseek},
        "gpt_oss": {
            "intermediate_size": 64,
            "head_dim": 16,
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            **experts,
        },
        "nemotron_h": {
            "layers_block_type": ["mamba", "moe"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 64,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 32,
        },
        "bamba": {
            "mamba_d_head": 32,
            "mamba_n_heads": 4,
            "mamba_d_state": 16,
            "mamba_chunk_size": 32,
            "attn_layer_indices": [1],
        },
        "jamba": {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
        "falcon_h1": {
            "head_dim": 16,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_chunk_size": 32,
        },
    }
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    if family in own:
        return kind(**{**sizes, **own[family]})
    image = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    seeing: dict[str, dict[str, Any]] = {
        "gemma3": {
            "text_config": {**sizes, **own["gemma3_text"]},
            "vision_config": {**image, "image_size": 28, "patch_size": 14},
            "image_token_index": 127,
        },
        "qwen3_vl": {
            "text_config": {
                **sizes,
                "head_dim": 16,
                "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]},
            },
            "vision_config": {
                **image,
                "depth": 1,
                "num_heads": 4,
                "out_hidden_size": 64,
                "deepstack_visual_indexes": [0],
            },
            "image_token_id": 127,
            "video_token_id": 126,
        },
    }
    return kind(**seeing[family])


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Model type -> folder of a random bf16 model of that architecture, with a tokenizer. Read only.

    Every parameter is drawn, norms and biases too, so that none can be lost without moving the logits.
    """
    made: dict[str, Path] = {}

    def save(family: str) -> Path:
        if family not in made:
            generator = torch.Generator().manual_seed(3)
            model = _auto_class(family).from_config(_tiny_config(family), dtype=torch.bfloat16)
            with torch.no_grad():
                for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                    if not tensor.is_floating_point() or name.endswith(("inv_freq", "embed_scale")):
                        continue
                    drawn = torch.randn(tensor.shape, generator=generator)
                    tensor.copy_(drawn * 0.12 if tensor.dim() > 1 else tensor + drawn * 0.1)
            folder = tmp_path_factory.mktemp(family) / family
            model.save_pretrained(folder)
            made[family] = add_tokenizer(folder)
        return made[family]

    return save
