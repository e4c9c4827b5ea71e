"""Benchmark tasks through EleutherAI's lm-evaluation-harness, and paired comparison of two models' answers.

A task is a name that lm-eval knows, a YAML file in its task format, or a folder of such files. In a local file,
relative `data_files` are looked for beside the file first, then (as lm-eval does) in the working directory; a task
whose data are local needs no network. The harness's own `evaluate` is called rather than `simple_evaluate`: the latter
reseeds the process's random generators and asks the hub about the model.
"""

import contextlib
import importlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from blockscale.errors import MissingDependencyError, UsageError
from blockscale.evaluation.result import NAN, Interval, TaskComparison, TaskResult
from blockscale.evaluation.statistics import mcnemar, paired_difference, score_interval

FEWSHOT_SEED = 1234  # lm-eval's own default, so that few-shot prompts are the ones others report on


def import_lm_eval() -> tuple[Any, Any, Any]:
    """(evaluate, TaskManager, HFLM), or MissingDependencyError."""
    try:
        from lm_eval.evaluator import evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise MissingDependencyError(
            f"benchmark tasks need lm-eval with its transformers back end ({error})",
            hint='pip install "blockscale[tasks]"',
        ) from error
    return evaluate, TaskManager, HFLM


def run_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    limit: int | None = None,
    batch_size: int = 8,
) -> list[TaskResult]:
    """Scores of a transformers causal LM on `tasks`, where the model is; `limit` samples of each at most."""
    if not tasks or (limit is not None and limit < 1):
        raise UsageError(
            f"nothing to run: tasks {list(tasks)}, limit {limit}", hint="name a task, or a limit from 1 up"
        )
    evaluate, task_manager, hflm = import_lm_eval()
    loaded = load_tasks(tasks, task_manager)
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    harness = hflm(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    found = evaluate(lm=harness, task_dict=loaded, limit=limit, bootstrap_iters=0, log_samples=True)
    return [task_result(name, found["results"][name], found["samples"][name]) for name in loaded["tasks"]]


def load_tasks(tasks: Sequence[str], task_manager: Any) -> dict[str, dict[str, Any]]:
    """lm-eval's dictionary of tasks, groups and group members for names and paths together."""
    merged: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    named = None  # lm-eval's own index: read once, and only if a name needs it, for that takes seconds
    for task in dict.fromkeys(tasks):
        path = Path(task)
        try:
            if path.exists():
                part = load_local(path, task_manager)
            else:
                named = named or task_manager()
                part = named.load([task])
        except (KeyError, OSError, ValueError) as error:
            raise UsageError(
                f"lm-eval cannot load the task '{task}': {error}",
                hint="give a name from `lm-eval ls tasks`, a task's YAML file, or a folder of them",
            ) from error
        for kind, entries in merged.items():
            entries.update(part.get(kind, {}))
    return merged


def load_local(path: Path, task_manager: Any) -> dict[str, Any]:
    """The task of a YAML file, or all tasks under a folder."""
    folder = path if path.is_dir() else path.parent
    manager = task_manager(include_path=str(folder.resolve()), include_defaults=False)
    names = list(manager.all_subtasks) if path.is_dir() else [str(path.resolve())]
    if not names:
        raise UsageError(f"{path} holds no lm-eval task", hint="a task is a .yaml file with a `task:` entry")
    with uncounted():
        try:
            with contextlib.chdir(folder):
                part: dict[str, Any] = manager.load(names)
        except FileNotFoundError:
            part = manager.load(names)
    return part


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Keeps `datasets` from reporting the load to its download counter, which it does for local files as well."""
    config: Any = importlib.import_module("datasets.config")
    before = config.HF_UPDATE_DOWNLOAD_COUNTS
    config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        yield
    finally:
        config.HF_UPDATE_DOWNLOAD_COUNTS = before


def task_result(name: str, metrics: dict[str, Any], samples: list[dict[str, Any]]) -> TaskResult:
    """From lm-eval's aggregates (`"acc,none": 0.5`) and its log of samples."""
    first_filter = samples[0]["filter"]
    rows = [sample for sample in samples if sample["filter"] == first_filter]
    values = {
        key.partition(",")[0]: float(value)
        for key, value in metrics.items()
        if key.endswith(f",{first_filter}") and "_stderr" not in key and is_number(value)
    }
    # The first metric with one number a sample; a perplexity, say, is a ratio of sums and has none.
    for metric in rows[0]["metrics"]:
        if metric in values and all(is_number(row[metric]) for row in rows):
            scores = [float(row[metric]) for row in rows]
            ids = tuple(row["doc_hash"] for row in rows)
            score = score_interval(np.array(scores))
            return TaskResult(name, metric, score, len(rows), values, tuple(scores), ids)
    metric = next(iter(values), "")
    return TaskResult(name, metric, Interval(values.get(metric, NAN)), len(rows), values)


def is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating))


def compare_tasks(candidate: Iterable[TaskResult], reference: Iterable[TaskResult]) -> list[TaskComparison]:
    """Both models on the same samples, for each of the candidate's tasks that has scores by sample."""
    references = {result.name: result for result in reference}
    comparisons = []
    for result in candidate:
        other = references.get(result.name)
        if other is None or other.metric != result.metric or other.sample_ids != result.sample_ids:
            raise UsageError(
                f"task '{result.name}': candidate and reference did not answer the same samples",
                hint="run both with the same tasks and limit",
            )
        if not result.scores:
            continue
        ours, theirs = np.array(result.scores), np.array(other.scores)
        gained, lost = int((ours > theirs).sum()), int((ours < theirs).sum())
        is_right_or_wrong = bool(np.isin(np.concatenate((ours, theirs)), (0.0, 1.0)).all())
        comparisons.append(
            TaskComparison(
                name=result.name,
                metric=result.metric,
                score=result.score.value,
                reference_score=other.score.value,
                difference=paired_difference(ours, theirs),
                num_gained=gained,
                num_lost=lost,
                p_value=mcnemar(ours == 1, theirs == 1)[2] if is_right_or_wrong else None,
            )
        )
    return comparisons
