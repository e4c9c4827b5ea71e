"""What the server counts, as Prometheus reads it. Each server has a registry of its own."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from blockscale.engine.engine import Stats

_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN_TOKENS_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_REQUEST_S = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters and histograms; `text()` is the page that Prometheus fetches.

    engine_figures  name -> (what it is, figure) of the engine's gauges, as they were last asked for
    """

    def __init__(self) -> None:
        self.engine_figures: Mapping[str, tuple[str, float]] = {}
        self.registry = registry = CollectorRegistry()
        self.first_token_s = Histogram(
            "blockscale_time_to_first_token_seconds",
            "From the request's arrival at the engine to its first token",
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self.between_tokens_s = Histogram(
            "blockscale_inter_token_latency_seconds",
            "Between tokens of one sequence; of several that come at once, their share each",
            buckets=_BETWEEN_TOKENS_S,
            registry=registry,
        )
        self.sequence_s = Histogram(
            "blockscale_sequence_seconds", "From arrival to the last token", buckets=_REQUEST_S, registry=registry
        )
        self.prompt_tokens = Counter("blockscale_prompt_tokens", "Tokens of prompts", registry=registry)
        self.output_tokens = Counter("blockscale_output_tokens", "Tokens that were generated", registry=registry)
        self.cached_tokens = Counter(
            "blockscale_cached_prompt_tokens", "Tokens of prompts found in the prefix cache", registry=registry
        )
        self.sequences = Counter(
            "blockscale_sequences", "Sequences that ended, by reason", ["finish_reason"], registry=registry
        )
        self.requests = Counter(
            "blockscale_http_requests", "Answers, by endpoint and status", ["endpoint", "status"], registry=registry
        )
        self.errors = Counter("blockscale_errors", "Requests that failed, by code", ["code"], registry=registry)
        self.canary_perplexity = _gauge("canary_perplexity", "Of the canary's text, when it was last scored", registry)
        self.canary_ratio = _gauge("canary_perplexity_ratio", "Of the canary's perplexity to the reference's", registry)
        self.canary_kl = _gauge(
            "canary_kl_nats", "KL divergence a token from the reference, over its likeliest tokens", registry
        )
        self.canary_has_drifted = _gauge("canary_drift", "1 where a bound of the canary is passed, else 0", registry)
        self.canary_time = _gauge("canary_timestamp_seconds", "When the canary was last scored", registry)
        registry.register(_Engine(lambda: self.engine_figures))
        self._num_output = 0
        registry.register(_Energy(lambda: self._num_output))

    def count_output(self, num_tokens: int) -> None:
        self.output_tokens.inc(num_tokens)
        self._num_output += num_tokens

    def text(self) -> bytes:
        return generate_latest(self.registry)


def _gauge(name: str, what: str, registry: CollectorRegistry) -> Gauge:
    gauge = Gauge(f"blockscale_{name}", what, registry=registry)
    gauge.set(float("nan"))  # until it is measured
    return gauge


class _Engine:
    """Gauges of figures that something else keeps."""

    def __init__(self, figures: Callable[[], Mapping[str, tuple[str, float]]]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        for name, (what, value) in self._figures().items():
            yield GaugeMetricFamily(f"blockscale_{name}", what, value=value)


class _Energy:
    """Joules that the GPUs took since the server began, where NVML counts them; nothing elsewhere."""

    def __init__(self, num_tokens: Callable[[], float]) -> None:
        self._num_tokens = num_tokens
        self._nvml, self._devices = _nvml_devices()
        self._start_j = self._total_j()

    def collect(self) -> Iterator[Metric]:
        total = self._total_j()
        if total is None or self._start_j is None:
            return
        joules, tokens = total - self._start_j, self._num_tokens()
        yield CounterMetricFamily("blockscale_energy_joules", "Of this machine's GPUs, since the start", value=joules)
        if tokens:
            what = "Energy since the start over tokens generated since, idle time included"
            yield GaugeMetricFamily("blockscale_joules_per_output_token", what, value=joules / tokens)

    def _total_j(self) -> float | None:
        if not self._devices:
            return None
        with contextlib.suppress(self._nvml.NVMLError):
            return sum(self._nvml.nvmlDeviceGetTotalEnergyConsumption(d) for d in self._devices) / 1000  # from mJ
        return None


def _nvml_devices() -> tuple[Any, list[Any]]:
    """NVML and its devices; none where the package or the driver is missing."""
    try:
        import pynvml
    except ImportError:
        return None, []
    try:
        pynvml.nvmlInit()
        return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return pynvml, []


def engine_figures(stats: "Stats") -> dict[str, tuple[str, float]]:
    """The engine's gauges, by name."""
    pages = stats.pages
    total = pages.free + pages.kept + pages.held
    return {
        "requests_running": ("Requests that are computed", stats.num_running),
        "requests_waiting": ("Requests in the queue", stats.num_waiting),
        "kv_pages": ("Pages of the KV cache", total),
        "kv_usage_ratio": ("Share of the pages that requests hold", pages.held / total if total else 0.0),
        "kv_kept_ratio": ("Share of the pages that are kept for prefixes alone", pages.kept / total if total else 0.0),
        "preemptions": ("Requests that gave their pages to others, since the start", stats.num_preempted),
        "draft_tokens": ("Tokens that were proposed from requests' own text, since the start", stats.num_drafted),
        "draft_tokens_accepted": ("Those of them that the model chose too", stats.num_accepted),
        "steps": ("Steps of the engine, since the start", stats.num_steps),
    }
