"""Benchmark runs as engines write them, read into one form.

vLLM          `vllm bench serve --save-result` (JSON; read in vllm/benchmarks/serve.py at 009e6d4). It names neither
              its version nor the GPU: `--metadata engine_version=0.19.0 gpu=b200 layout=tp4 format=nvfp4` puts
              them in
SGLang        `python -m sglang.bench_serving --output-file` (JSON lines; sglang/benchmark/serving.py of 0.5.23)
TensorRT-LLM  `trtllm-bench throughput|latency --streaming --report_json` (JSON; bench/dataclasses/reporting.py at
              0249976)
blockscale    `blockscale bench engine --json`: a list of rows, or an object whose `rows` they are and whose other
              fields hold for each: engine, engine_version, gpu, model, weights (or format), layout, input_tokens,
              output_tokens, sequences in flight (or concurrency), ttft_ms and itl_ms: means, or objects that have one
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockscale.errors import UsageError
from blockscale.planning.calibration.identity import format_in
from blockscale.planning.speed.layout import Layout, parse_layout

_MAX_BYTES = 500_000_000  # --save-detailed keeps the time of every token


@dataclass(frozen=True)
class Measurement:
    """One run, as means over its requests. What the file does not say is None.

    sequences   requests in flight, over all replicas
    itl_s       time per output token after the first
    gpu         in the file's own words
    where       file and entry, for messages
    format      of the weights, as the file or the model's name says it
    """

    engine: str
    version: str | None
    gpu: str | None
    model: str | None
    layout: Layout | None
    input_tokens: float
    output_tokens: float
    sequences: float
    itl_s: float | None
    ttft_s: float | None
    where: str
    format: str | None = None

    @property
    def num_figures(self) -> int:
        """How many of ITL and TTFT it has."""
        return (self.itl_s is not None) + (self.ttft_s is not None)


def read_measurements(path: Path) -> list[Measurement]:
    """Every run in a file: JSON, a list of such, or JSON lines. UsageError for what is none of the four forms."""
    found = []
    for number, entry in enumerate(_entries(path), 1):
        where = f"{path.name}, run {number}"
        try:
            found.append(_reader(entry, where)(entry, where))
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as e:
            what = f"lacks {e}" if isinstance(e, KeyError) else str(e)
            raise UsageError(f"{where}: {what}", hint="was the file cut, or the run ended early?") from e
    return found


def _entries(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        if not path.is_file():
            raise UsageError(f"{path}: no such file", hint="give the JSON that a benchmark wrote")
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{path}: too large for a benchmark's result", hint="save it without the single requests")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"{path}: cannot be read: {e}", hint="check the path") from e
    try:
        content = _parse(text)
    except (ValueError, RecursionError) as e:
        raise UsageError(
            f"{path}: not valid JSON: {e}", hint="give the JSON or JSON lines that a benchmark wrote"
        ) from e
    if not content:
        raise UsageError(f"{path}: no run in it", hint="give the JSON that a benchmark wrote")
    for number, entry in enumerate(content, 1):
        if not isinstance(entry, Mapping):
            raise UsageError(f"{path.name}, run {number}: not a JSON object", hint="give a benchmark's own result")
        rows = entry.get("rows")
        if isinstance(rows, list):
            common = {key: value for key, value in entry.items() if key != "rows"}
            for row in rows:
                if not isinstance(row, Mapping):
                    raise UsageError(f"{path.name}: a row is no JSON object", hint="each row is one run")
                yield {**common, **row}
        else:
            yield entry


def _parse(text: str) -> list[Any]:
    try:
        content = json.loads(text)
    except ValueError:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 2:
            raise
        return [json.loads(line) for line in lines]
    return content if isinstance(content, list) else [content]


def _reader(entry: Mapping[str, Any], where: str) -> Callable[[Mapping[str, Any], str], Measurement]:
    if "performance" in entry and "world_info" in entry:
        return _tensorrt_llm
    if "mean_ttft_ms" in entry or "mean_tpot_ms" in entry:
        is_sglang = "server_info" in entry or "total_output_tokens_retokenized" in entry
        return _sglang if is_sglang else _vllm
    if "itl_ms" in entry or "ttft_ms" in entry:
        return _blockscale
    raise UsageError(
        f"{where}: no benchmark result that is known here",
        hint="known: vllm bench serve, sglang bench_serving, trtllm-bench (--streaming), blockscale bench engine",
    )


def _vllm(entry: Mapping[str, Any], where: str) -> Measurement:
    _refuse_drafts(entry.get("spec_decode_acceptance_length"), where)
    return _measurement(
        where,
        engine="vllm",
        formats=entry.get("format") or entry.get("quantization"),
        version=_text(entry.get("engine_version") or entry.get("version")),
        gpu=_text(entry.get("gpu")),
        model=_text(entry.get("model_id")),
        layout=_layout(entry),
        requests=entry,
        sequences=_in_flight(entry, None),
        itl_ms=entry.get("mean_tpot_ms"),
        ttft_ms=entry.get("mean_ttft_ms"),
    )


def _sglang(entry: Mapping[str, Any], where: str) -> Measurement:
    _refuse_drafts(entry.get("accept_length"), where)
    server = entry.get("server_info") or {}
    return _measurement(
        where,
        engine="sglang",
        formats=server.get("quantization"),
        version=_text(server.get("version")),
        gpu=_text(entry.get("gpu")),
        model=_text(server.get("model_path")),
        layout=_sglang_layout(server),
        requests=entry,
        sequences=_in_flight(entry, entry.get("concurrency")),
        itl_ms=entry.get("mean_tpot_ms"),
        ttft_ms=entry.get("mean_ttft_ms"),
    )


def _sglang_layout(server: Mapping[str, Any]) -> Layout | None:
    """Where attention is copied, tp_size counts the GPUs of all copies. Newer servers tell its copies (attn_dp_size)
    from those of everything (dp_size)."""
    if not server.get("tp_size"):
        return None
    tensor, data = int(server["tp_size"]), int(server.get("dp_size") or 1)
    copies, replicas = (data, 1) if server.get("enable_dp_attention") else (1, data)
    if "attn_dp_size" in server:
        copies, replicas = int(server["attn_dp_size"] or 1), data
    return Layout(
        tensor=max(tensor // copies, 1),
        pipeline=int(server.get("pp_size") or 1),
        attention_data=copies,
        is_expert=int(server.get("ep_size") or 1) > 1,
        replicas=replicas,
    )


def _tensorrt_llm(entry: Mapping[str, Any], where: str) -> Measurement:
    if "decoding_stats" in entry:
        _refuse_drafts(math.inf, where)
    streaming = entry.get("streaming_metrics")
    if not isinstance(streaming, Mapping):
        raise UsageError(f"{where}: no latencies of tokens", hint="run trtllm-bench with --streaming")
    requests, world = entry["request_info"], entry["world_info"]
    engine, machine = entry.get("engine") or {}, entry.get("machine") or {}
    layout = Layout(
        tensor=int(world["tp_size"]),
        pipeline=int(world.get("pp_size") or 1),
        is_expert=int(world.get("ep_size") or 1) > 1,
    )
    return _measurement(
        where,
        engine="tensorrt-llm",
        formats=engine.get("quantization"),
        version=_text(engine.get("version")),
        gpu=_text(machine.get("name")),
        model=_text(engine.get("model")),
        layout=layout,
        requests={
            "completed": requests["num_requests"],
            "total_input_tokens": requests["avg_input_length"] * requests["num_requests"],
            "total_output_tokens": requests["avg_output_length"] * requests["num_requests"],
        },
        sequences=float(requests["avg_num_concurrent_requests"]),
        itl_ms=streaming.get("avg_tpot_ms"),
        ttft_ms=streaming.get("avg_ttft_ms"),
    )


def _blockscale(entry: Mapping[str, Any], where: str) -> Measurement:
    return _measurement(
        where,
        engine=str(entry.get("engine") or "blockscale"),
        formats=entry.get("format") or entry.get("weights"),
        version=_text(entry.get("engine_version") or entry.get("version")),
        gpu=_text(entry.get("gpu")),
        model=_text(entry.get("model")),
        layout=_layout(entry),
        requests={
            "completed": 1,
            "total_input_tokens": entry["input_tokens"],
            "total_output_tokens": entry["output_tokens"],
        },
        sequences=float(entry.get("concurrency") or entry["sequences"]),
        itl_ms=_mean(entry.get("itl_ms")),
        ttft_ms=_mean(entry.get("ttft_ms")),
    )


def _mean(figure: Any) -> Any:
    return figure["mean"] if isinstance(figure, Mapping) else figure


def _measurement(
    where: str,
    *,
    engine: str,
    version: str | None,
    gpu: str | None,
    model: str | None,
    layout: Layout | None,
    requests: Mapping[str, Any],
    sequences: float,
    itl_ms: Any,
    ttft_ms: Any,
    formats: Any = None,
) -> Measurement:
    completed = float(requests["completed"])
    itl_s, ttft_s = (
        None if not ms else _positive(ms, what, where) / 1e3 for ms, what in ((itl_ms, "ITL"), (ttft_ms, "TTFT"))
    )
    if itl_s is None and ttft_s is None:
        raise UsageError(f"{where}: neither TTFT nor time per token", hint="measure with streaming")
    return Measurement(
        engine,
        version,
        gpu,
        model,
        layout,
        _positive(float(requests["total_input_tokens"]) / completed, "input tokens", where),
        _positive(float(requests["total_output_tokens"]) / completed, "output tokens", where),
        _positive(sequences, "requests in flight", where),
        itl_s,
        ttft_s,
        where,
        _format(formats, model),
    )


def _format(said: Any, model: str | None) -> str | None:
    """What a field says goes before the model's name."""
    found = format_in(said) if isinstance(said, str) else None
    return found or (None if model is None else format_in(model))


def _in_flight(entry: Mapping[str, Any], counted: Any) -> float:
    """The limit on requests in flight where clients keep it filled, else what Little's law makes of rate and time."""
    rate, limit, completed = entry.get("request_rate"), entry.get("max_concurrency"), float(entry["completed"])
    if limit and (rate in (None, "inf") or float(rate) == math.inf):
        return min(float(limit), completed)
    if counted:
        return float(counted)
    tokens = float(entry["total_output_tokens"]) / completed
    latency_s = (float(entry["mean_ttft_ms"]) + float(entry["mean_tpot_ms"]) * max(tokens - 1, 0)) / 1e3
    return max(float(entry["request_throughput"]) * latency_s, 1.0)


def _refuse_drafts(accepted: Any, where: str) -> None:
    """Several tokens a step fit no efficiency of a step with one."""
    if accepted and float(accepted) > 1:
        raise UsageError(f"{where}: measured with speculative decoding", hint="measure without draft tokens")


def _layout(entry: Mapping[str, Any]) -> Layout | None:
    if entry.get("layout"):
        return parse_layout(str(entry["layout"]))
    tensor = entry.get("tp") or entry.get("tensor_parallel_size") or entry.get("tp_size")
    return Layout(tensor=int(tensor)) if tensor else None


def _positive(value: Any, what: str, where: str) -> float:
    number = float(value)
    if not (number > 0 and math.isfinite(number)):
        raise UsageError(f"{where}: {what} is {value}", hint="the run measured nothing")
    return number


def _text(value: Any) -> str | None:
    return str(value) if value else None
