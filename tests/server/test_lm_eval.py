"""lm-eval's `local-completions` against a server over a real decoder, on tasks of local files. Needs `lm_eval`."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval")
pytest.importorskip("tenacity")

from blockscale.engine.options import EngineOptions
from tests.models.running import transformers_logits
from tests.server.running import Running, decoding

CHOICES = ["red", "blue", "green ones"]
ITEMS = [("sky", 1), ("grass", 2), ("blood", 0), ("sea", 1), ("leaf", 2)]
_TASK = """
task: colours
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{thing}}}} is"
"""
_CHOICE = """doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
_TEXT = """doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 6, temperature: 0.0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def path(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer's texts have no spaces between tokens, so that lm-eval can go from tokens to text and back."""
    folder = shutil.copytree(tiny_model("llama"), tmp_path_factory.mktemp("lm_eval") / "model")
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "decoder": {"type": "Fuse"}}))
    return folder


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[Running]:
    with decoding(path, EngineOptions(num_pages=40, max_running=8, max_step_tokens=64, max_context=128)) as (it, _):
        yield it


def evaluate(server: Running, folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch, **model: Any) -> list[Any]:
    """lm-eval's samples of the task."""
    from lm_eval import simple_evaluate
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    data, task = folder / "colours.jsonl", folder / "colours.yaml"
    data.write_text("".join(json.dumps({"thing": t, "choices": CHOICES, "answer": a}) + "\n" for t, a in ITEMS))
    rest = _CHOICE if kind == "multiple_choice" else _TEXT
    task.write_text(_TASK.format(data=data, kind=kind) + rest)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    asked = {"model": "tiny", "base_url": f"{server.url}/v1/completions", "max_length": 128, "max_retries": 1, **model}
    found = simple_evaluate(LocalCompletionsAPI(**asked), tasks=["colours"], task_manager=manager, bootstrap_iters=0)
    return list(found["samples"]["colours"])


def loglikelihood(path: Path, context: str, answer: str) -> tuple[float, bool]:
    ids = torch.tensor(list((context + answer).encode()))
    rows = transformers_logits(path, ids).log_softmax(-1)[len(context) - 1 : -1]
    own = ids[len(context) :]
    return float(rows.gather(1, own[:, None]).sum()), bool((rows.argmax(-1) == own).all())


@pytest.mark.parametrize(
    "model",
    [
        {"tokenizer_backend": "huggingface", "batch_size": 4},
        {"tokenizer_backend": "huggingface", "num_concurrent": 4},
        {"tokenizer_backend": "huggingface", "tokenized_requests": False},
        {"tokenizer_backend": "remote"},
    ],
    ids=["batches", "at once", "texts", "the server's tokenizer"],
)
def test_choices(
    server: Running, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any]
) -> None:
    """Log-likelihoods are transformers', and so is what is picked."""
    local = {"tokenizer": str(path)} if model["tokenizer_backend"] == "huggingface" else {}
    samples = evaluate(server, tmp_path, "multiple_choice", monkeypatch, **model, **local)
    assert len(samples) == len(ITEMS)
    for sample in samples:
        thing = ITEMS[sample["doc_id"]][0]
        expected = [loglikelihood(path, f"{thing} is", f" {choice}") for choice in CHOICES]
        found = [(float(value), flag) for ((value, flag),) in sample["resps"]]
        assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=0.05)
        assert [flag for _, flag in found] == [flag for _, flag in expected]
        best = max(range(3), key=lambda i: expected[i][0])
        assert sample["acc"] == (best == ITEMS[sample["doc_id"]][1])


def test_texts(server: Running, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = evaluate(
        server, tmp_path, "generate_until", monkeypatch, tokenizer_backend="huggingface", tokenizer=str(path)
    )
    for sample in samples:
        prompt = f"{ITEMS[sample['doc_id']][0]} is"
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0, "stop": ["\n"]}
        alone = server.post("/v1/completions", **body).json()
        assert sample["resps"] == [[alone["choices"][0]["text"]]]
