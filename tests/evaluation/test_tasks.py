"""lm-eval with a tiny random model and local task files; the network is closed."""

import json
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")

from blockscale.errors import MissingDependencyError, UsageError
from blockscale.evaluation.result import Interval, TaskResult
from blockscale.evaluation.tasks import compare_tasks, run_tasks, task_result

QA = Path(__file__).parent.parent / "golden" / "qa"


@pytest.fixture(autouse=True)
def closed_network(monkeypatch, tmp_path):
    attempts = []

    def refuse(*arguments, **_):
        attempts.append(arguments)
        raise OSError("the network is closed")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    yield
    assert attempts == []


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*letters, "<eos>"])}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<eos>", pad_token="<eos>")


def tiny_llama(seed: int):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model():
    return tiny_llama(0)


def expected_answers(model, tokenizer, items: list[dict]) -> list[float]:
    """Which choice has the highest log-likelihood as a continuation, worked out here."""
    right = []
    for item in items:
        scores = []
        context = tokenizer.encode(f"Question: {item['input']}\nAnswer:")
        for choice in item["choices"]:
            answer = tokenizer.encode(f" {choice}")
            with torch.no_grad():
                logits = model(torch.tensor([context + answer])).logits[0].log_softmax(-1)
            rows = torch.arange(len(context) - 1, len(context) + len(answer) - 1)
            scores.append(logits[rows, torch.tensor(answer)].sum().item())
        right.append(float(int(np.argmax(scores)) == item["answer"]))
    return right


def test_a_task_file(model, tokenizer, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)  # its data lie beside the file, not here
    (result,) = run_tasks(model, tokenizer, [str(QA / "general_knowledge.yaml")], limit=20)
    items = [json.loads(line) for line in (QA / "general_knowledge.jsonl").read_text().splitlines()][:20]
    assert result.scores == tuple(expected_answers(model, tokenizer, items))
    assert (result.name, result.metric, result.num_samples) == ("general_knowledge_40", "acc", 20)
    assert result.score.value == pytest.approx(sum(result.scores) / 20)
    assert result.score.low < result.score.value < result.score.high
    assert set(result.metrics) == {"acc", "acc_norm"}
    assert len(set(result.sample_ids)) == 20
    assert Path.cwd() == tmp_path


def test_a_folder_of_tasks_and_a_paired_comparison(model, tokenizer) -> None:
    candidate = run_tasks(tiny_llama(1), tokenizer, [str(QA)], limit=25)
    reference = run_tasks(model, tokenizer, [str(QA)], limit=25)
    assert [r.name for r in candidate] == ["general_knowledge_40", "phrase_relatedness_40"]
    for ours, theirs, compared in zip(candidate, reference, compare_tasks(candidate, reference), strict=True):
        pairs = list(zip(ours.scores, theirs.scores, strict=True))
        assert compared.num_gained == pairs.count((1.0, 0.0))
        assert compared.num_lost == pairs.count((0.0, 1.0))
        assert compared.difference.value == pytest.approx((compared.num_gained - compared.num_lost) / 25)
        assert 0 < compared.p_value <= 1


def test_data_files_relative_to_the_working_directory(model, tokenizer, monkeypatch, tmp_path) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "quiz.yaml").write_text((QA / "phrase_relatedness.yaml").read_text())
    (tmp_path / "phrase_relatedness.jsonl").write_text((QA / "phrase_relatedness.jsonl").read_text())
    monkeypatch.chdir(tmp_path)
    (result,) = run_tasks(model, tokenizer, ["tasks/quiz.yaml"], limit=2)
    assert result.num_samples == 2


def test_random_state_is_left_alone(model, tokenizer) -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    run_tasks(model, tokenizer, [str(QA / "phrase_relatedness.yaml")], limit=1)
    assert torch.equal(before, torch.random.get_rng_state())


def test_tasks_that_cannot_be_loaded(model, tokenizer, tmp_path) -> None:
    with pytest.raises(UsageError, match="holds no lm-eval task"):
        run_tasks(model, tokenizer, [str(tmp_path)])
    (tmp_path / "bad.yaml").write_text("greeting: hello\n")
    with pytest.raises(UsageError, match=r"bad\.yaml"):
        run_tasks(model, tokenizer, [str(tmp_path / "bad.yaml")])
    (tmp_path / "lost.yaml").write_text((QA / "general_knowledge.yaml").read_text())
    with pytest.raises(UsageError, match=r"lost\.yaml"):
        run_tasks(model, tokenizer, [str(tmp_path / "lost.yaml")])
    with pytest.raises(UsageError, match="nothing to run"):
        run_tasks(model, tokenizer, [])
    with pytest.raises(UsageError, match="limit"):
        run_tasks(model, tokenizer, ["x"], limit=0)


@pytest.mark.slow
def test_a_name_that_lm_eval_does_not_know(model, tokenizer) -> None:
    with pytest.raises(UsageError, match="no_such_task"):
        run_tasks(model, tokenizer, ["no_such_task"])


def test_without_lm_eval(model, tokenizer, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval.evaluator", None)
    with pytest.raises(MissingDependencyError, match="lm-eval") as failure:
        run_tasks(model, tokenizer, [str(QA)])
    assert "blockscale[tasks]" in failure.value.hint


def answers(*scores: float, ids: str = "abcd", metric: str = "acc") -> TaskResult:
    value = sum(scores) / len(scores)
    return TaskResult("t", metric, Interval(value), len(scores), {metric: value}, scores, tuple(ids[: len(scores)]))


def test_comparison_of_other_scores_has_no_mcnemar() -> None:
    (compared,) = compare_tasks([answers(0.5, 0.25, metric="f1")], [answers(0.25, 0.25, metric="f1")])
    assert compared.p_value is None
    assert (compared.num_gained, compared.num_lost) == (1, 0)
    assert compared.difference.value == pytest.approx(0.125)


def test_different_samples_are_not_compared() -> None:
    with pytest.raises(UsageError, match="same samples"):
        compare_tasks([answers(1.0, 0.0)], [answers(1.0, 0.0, ids="xy")])
    with pytest.raises(UsageError, match="same samples"):
        compare_tasks([answers(1.0, 0.0)], [])


def test_a_metric_without_sample_scores() -> None:
    samples = [{"filter": "none", "metrics": ["word_perplexity"], "word_perplexity": (-3.0, 2), "doc_hash": "a"}]
    result = task_result("t", {"word_perplexity,none": 4.5, "alias": "t"}, samples)
    assert (result.metric, result.score.value, result.scores) == ("word_perplexity", 4.5, ())
    assert compare_tasks([result], [result]) == []
