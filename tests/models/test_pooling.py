"""What sentence-transformers' files say of an embedding, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from blockscale.checkpoint.steps import step_folders
from blockscale.errors import CheckpointError, ModelError
from blockscale.models.pooling import Embedding, Pooling, read_embedding

KINDS = ("Transformer", "Pooling", "Normalize")


def write(folder: Path, pooling: Any, kinds: tuple[str, ...] = KINDS, **files: Any) -> Path:
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": paths.get(kind, f"{i}_{kind}"),
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (folder / "1_Pooling").mkdir()
    contents = {"config": {"hidden_size": 64}, "modules": modules, "1_Pooling/config": pooling, **files}
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, Pooling.LAST),
        ({"pooling_mode_cls_token": True, "word_embedding_dimension": 64}, Pooling.FIRST),
        ({"pooling_mode_mean_tokens": True}, Pooling.MEAN),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 64}, Pooling.LAST),
        ({"pooling_mode": ["mean"]}, Pooling.MEAN),
    ],
)
def test_poolings(tmp_path: Path, pooling: dict[str, Any], expected: Pooling) -> None:
    assert read_embedding(write(tmp_path, pooling)) == Embedding(expected, 64, True)


def test_what_stands_beside_it(tmp_path: Path) -> None:
    config = {"hidden_size": 64, "matryoshka_dimensions": [32, 16]}
    path = write(
        tmp_path,
        {"pooling_mode_lasttoken": True},
        KINDS[:2],
        config=config,
        sentence_bert_config={"max_seq_length": 77, "do_lower_case": False},
        config_sentence_transformers={"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": None},
    )
    assert read_embedding(path) == Embedding(Pooling.LAST, 64, False, 77, (16, 32))


def test_a_model_that_writes(tmp_path: Path) -> None:
    assert read_embedding(tmp_path) is None


MEAN = {"pooling_mode_mean_tokens": True}


@pytest.mark.parametrize(
    ("pooling", "files", "message"),
    [
        ({"pooling_mode_max_tokens": True}, {}, "pooling by max_tokens"),
        ({"pooling_mode_cls_token": True, **MEAN}, {}, "cls_token and mean_tokens"),
        ({}, {}, "pooling by nothing"),
        (MEAN, {"kinds": (*KINDS[:2], "Dense", "Normalize")}, "Transformer, Pooling, Dense, Normalize"),
        (MEAN, {"kinds": ("StaticEmbedding",)}, "StaticEmbedding"),
        ({**MEAN, "word_embedding_dimension": 32}, {}, "another size"),
        (MEAN, {"config": {"hidden_size": 64, "use_bidirectional_attention": True}}, "tokens see those after them"),
        (MEAN, {"config": {"hidden_size": 64, "is_causal": False}}, "tokens see those after them"),
        (MEAN, {"sentence_bert_config": {"do_lower_case": True}}, "lower case"),
        (
            MEAN,
            {"config_sentence_transformers": {"prompts": {"q": "Q: "}, "default_prompt_name": "q"}},
            "prompt 'q'",
        ),
    ],
)
def test_what_is_not_computed(tmp_path: Path, pooling: Any, files: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_embedding(write(tmp_path, pooling, **files))


@pytest.mark.parametrize("text", ["{", "{}", '[{"path": ""}]', "[5]"])
def test_files_that_are_broken(tmp_path: Path, text: str) -> None:
    write(tmp_path, MEAN)
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        read_embedding(tmp_path)


def test_only_folders_inside_the_model_s_are_steps(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder, MEAN)
    modules = [{"path": path} for path in ("", "1_Pooling", "1_Pooling", "..", "../model", ".", "absent", "/", 5)] + [5]
    (folder / "modules.json").write_text(json.dumps(modules))
    assert step_folders(folder) == [folder / "1_Pooling"]
    (folder / "modules.json").write_text("{")
    assert step_folders(folder) == []
