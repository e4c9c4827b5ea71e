"""What makes an embedding model of a decoder: how its checkpoint has hidden states become one vector.

Read from the files that sentence-transformers keeps beside the weights: `modules.json` lists the steps, a step's folder
has its config.json, `sentence_bert_config.json` bounds the texts, `config_sentence_transformers.json` names prompts.
"""

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from blockscale.checkpoint.steps import MODULES_NAME
from blockscale.checkpoint.structure import text_config
from blockscale.errors import CheckpointError, ModelError

NOT_TRAINED = "it writes text and was not trained to embed it"
_HINT = "serve it with sentence-transformers"


class Pooling(Enum):
    """Which hidden states, after the final norm, become the vector."""

    LAST = "last"  # of the last token
    FIRST = "first"
    MEAN = "mean"  # of all tokens


# Both ways that files say it: a flag each, or one name
_NAMES = {
    "lasttoken": Pooling.LAST,
    "cls": Pooling.FIRST,
    "cls_token": Pooling.FIRST,
    "mean": Pooling.MEAN,
    "mean_tokens": Pooling.MEAN,
}


@dataclass(frozen=True)
class Embedding:
    """is_normalized  vectors have length 1
    max_tokens     of a text; None: as many as the model's context
    lengths        that vectors may be cut to, where the checkpoint names them; None: any
    """

    pooling: Pooling
    size: int
    is_normalized: bool
    max_tokens: int | None = None
    lengths: tuple[int, ...] | None = None


def read_embedding(path: Path) -> Embedding | None:
    """None for a folder without `modules.json`: a model that was not trained to embed.

    ModelError for a step that is not computed here; CheckpointError for files that cannot be read.
    """
    if not (path / MODULES_NAME).is_file():
        return None
    modules = _read(path / MODULES_NAME)
    kinds = [str(_entry(module, "type", path)).rsplit(".", 1)[-1] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelError(f"{path}: an embedding of the steps {', '.join(kinds) or 'none'}", hint=_HINT)
    config = _read(path / "config.json")
    _check_direction(path, config)
    pooling = _read(path / str(_entry(modules[1], "path", path)) / "config.json")
    texts = _read(path / "sentence_bert_config.json", is_needed=False)
    if texts.get("do_lower_case"):
        raise ModelError(f"{path}: texts are made lower case before they are embedded", hint=_HINT)
    prompts = _read(path / "config_sentence_transformers.json", is_needed=False)
    default = prompts.get("default_prompt_name")
    if default and (prompts.get("prompts") or {}).get(default):
        raise ModelError(f"{path}: every text gets the prompt '{default}' before it", hint=_HINT)
    size = int(text_config(config)["hidden_size"])
    if int(pooling.get("word_embedding_dimension") or pooling.get("embedding_dimension") or size) != size:
        raise ModelError(f"{path}: pooling of another size than the model's {size}", hint=_HINT)
    lengths, most = config.get("matryoshka_dimensions"), texts.get("max_seq_length")
    return Embedding(
        _pooling(path, pooling),
        size,
        len(kinds) == 3,
        None if most is None else int(most),
        None if lengths is None else tuple(sorted(int(length) for length in lengths)),
    )


def _pooling(path: Path, config: dict[str, Any]) -> Pooling:
    """From `pooling_mode_*: true`, of which there must be one, or from `pooling_mode: name`."""
    prefix = "pooling_mode_"
    names = [key.removeprefix(prefix) for key, value in config.items() if key.startswith(prefix) and value is True]
    named = config.get("pooling_mode")
    names += [named] if isinstance(named, str) else [str(name) for name in named or ()]
    if len(names) != 1 or names[0] not in _NAMES:
        raise ModelError(f"{path}: pooling by {' and '.join(names) or 'nothing'}", hint=_HINT)
    return _NAMES[names[0]]


def _check_direction(path: Path, config: dict[str, Any]) -> None:
    text = text_config(config)
    if text.get("use_bidirectional_attention") or text.get("is_causal") is False:
        raise ModelError(f"{path}: tokens see those after them, and in decoders here they do not", hint=_HINT)


def _read(file: Path, *, is_needed: bool = True) -> Any:
    """{} for a file that is not there and not needed."""
    if not is_needed and not file.is_file():
        return {}
    kind = list if file.name == MODULES_NAME else dict
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{file}: not readable: {e}", hint="restore the file that the model came with") from e
    if not isinstance(data, kind):
        raise CheckpointError(f"{file}: not the JSON {kind.__name__} that it should be", hint="restore the file")
    return data


def _entry(module: Any, name: str, path: Path) -> Any:
    if not isinstance(module, dict) or name not in module:
        raise CheckpointError(f"{path / MODULES_NAME}: a step without '{name}'", hint="restore the file")
    return module[name]
