"""What an evaluation found, as data. Figures that could not be had are None (or NaN); JSON has null for both."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

NAN = float("nan")


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % confidence interval; `low` and `high` are NaN where none can be told."""

    value: float
    low: float = NAN
    high: float = NAN


@dataclass(frozen=True)
class TextResult:
    """One text. What compares with a reference is None where there was none."""

    name: str
    num_tokens: int  # scored
    num_windows: int
    perplexity: Interval
    reference_perplexity: Interval | None = None
    perplexity_ratio: Interval | None = None  # perplexity / reference_perplexity, paired
    kl_mean: Interval | None = None  # nats per token, KL(reference || candidate)
    kl_p99: float | None = None  # nats: 99 % of the tokens lie below
    top1_agreement: Interval | None = None  # fraction of tokens, 0..1


@dataclass(frozen=True)
class LayerError:
    """One weight, as quantized."""

    name: str
    format: str
    sqnr_db: float
    bits_per_parameter: float
    num_parameters: int


@dataclass(frozen=True)
class TaskResult:
    """One benchmark task. `scores` and `sample_ids` have one entry a sample and stay out of the JSON."""

    name: str
    metric: str  # the one that `score` and `scores` are of
    score: Interval
    num_samples: int
    metrics: Mapping[str, float]
    scores: tuple[float, ...] = field(default=(), repr=False)
    sample_ids: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class TaskComparison:
    """Candidate against reference on the same samples."""

    name: str
    metric: str
    score: float
    reference_score: float
    difference: Interval  # score - reference_score, paired
    num_gained: int  # samples that only the candidate has right
    num_lost: int  # samples that only the reference has right
    p_value: float | None  # McNemar's exact test; None for scores other than right and wrong


@dataclass(frozen=True)
class Report:
    """All of an evaluation. `convention` says how the texts were cut and scored."""

    model: str
    reference: str | None = None
    texts: tuple[TextResult, ...] = ()
    layers: tuple[LayerError, ...] = ()
    tasks: tuple[TaskResult, ...] = ()
    task_comparisons: tuple[TaskComparison, ...] = ()
    convention: str = ""
    recipe: str = ""
    notices: tuple[str, ...] = ()  # what to know before the figures are believed
    versions: Mapping[str, str] = field(default_factory=dict)
    bytes: int | None = None
    bits_per_parameter: float | None = None
    date: str = ""

    @property
    def perplexity(self) -> float | None:
        """Over all texts: exp of the mean nll of all scored tokens."""
        return _pooled_perplexity([(t.num_tokens, _value(t.perplexity)) for t in self.texts])

    @property
    def reference_perplexity(self) -> float | None:
        """The reference's, over the same tokens."""
        return _pooled_perplexity([(t.num_tokens, _value(t.reference_perplexity)) for t in self.texts])

    @property
    def perplexity_ratio(self) -> float | None:
        """perplexity / reference_perplexity."""
        return _pooled_perplexity([(t.num_tokens, _value(t.perplexity_ratio)) for t in self.texts])

    @property
    def kl_mean(self) -> float | None:
        """Nats per token, over all scored tokens."""
        return _weighted_mean([(t.num_tokens, _value(t.kl_mean)) for t in self.texts])

    @property
    def top1_agreement(self) -> float | None:
        """Fraction of all scored tokens on which both models' first choice is the same."""
        return _weighted_mean([(t.num_tokens, _value(t.top1_agreement)) for t in self.texts])

    def to_dict(self) -> dict[str, object]:
        """For JSON. A figure with an interval is a number, with `<key>_interval: [low, high]` beside it."""
        head = {
            "model": self.model,
            "reference": self.reference,
            "perplexity": self.perplexity,
            "reference_perplexity": self.reference_perplexity,
            "perplexity_ratio": self.perplexity_ratio,
            "kl_mean": self.kl_mean,
            "top1_agreement": self.top1_agreement,
            "num_tokens": sum(t.num_tokens for t in self.texts),
            "texts": self.texts,
            "tasks": self.tasks,
            "task_comparisons": self.task_comparisons,
            "bytes": self.bytes,
            "bits_per_parameter": self.bits_per_parameter,
            "convention": self.convention,
            "notices": self.notices,
            "recipe": self.recipe,
            "date": self.date,
            "versions": self.versions,
            "layers": self.layers,
        }
        return {key: _plain(value) for key, value in head.items()}


def _value(interval: Interval | None) -> float | None:
    return None if interval is None else interval.value


def _weighted_mean(pairs: list[tuple[int, float | None]]) -> float | None:
    """Mean of values with weights; None if there is none or one is missing."""
    total = 0.0
    for weight, value in pairs:
        if value is None:
            return None
        total += weight * value
    return total / sum(weight for weight, _ in pairs) if pairs else None


def _pooled_perplexity(pairs: list[tuple[int, float | None]]) -> float | None:
    """Geometric mean, weighted by tokens; overflow gives inf."""
    mean = _weighted_mean([(n, None if value is None else _log(value)) for n, value in pairs])
    if mean is None:
        return None
    try:
        return math.exp(mean)
    except OverflowError:
        return math.inf


def _log(x: float) -> float:
    return math.log(x) if x > 0 else (-math.inf if x == 0 else NAN)


def _plain(value: object) -> object:
    """Dataclasses, tuples and mappings as what json.dumps(allow_nan=False) takes."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if not hasattr(value, "__dataclass_fields__"):
        return value
    plain: dict[str, object] = {}
    for key in value.__dataclass_fields__:
        item = getattr(value, key)
        if key in ("scores", "sample_ids"):
            continue
        if isinstance(item, Interval):
            plain[key] = _plain(item.value)
            plain[f"{key}_interval"] = _plain([item.low, item.high])
        else:
            plain[key] = _plain(item)
    return plain
