"""The verb `bench engine`: a checkpoint, or an architecture with random weights, under one load after the other."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from blockscale.engine.bench.energy import energy_meter
from blockscale.engine.bench.figures import Row, Subject, row
from blockscale.engine.bench.floor import KV_BYTES, decode_bytes
from blockscale.engine.bench.random_model import draw_weights, random_config, write_hollow
from blockscale.engine.bench.workload import Run, Workload, drive
from blockscale.engine.engine import Engine
from blockscale.engine.model import Model
from blockscale.engine.options import EngineOptions
from blockscale.engine.parallel import ParallelModel
from blockscale.errors import EngineError, UsageError
from blockscale.kernels.bench.clock import read_bandwidth
from blockscale.kernels.bench.run import default_device
from blockscale.kernels.device import describe
from blockscale.planning.models.model import find_model

Progress = Callable[[str, int, int], None]
# a folder, the format of its cache ("bf16", "fp8", "nvfp4") and the device -> the loaded model
LoadModel = Callable[[Path, str, torch.device], Model]
_WARM_TOKENS = 8
_LEAST_REQUESTS = 4
_LEAST_DRAWN = 0.95  # of a random model's bytes: norms stay ones


def workloads(
    input_tokens: int,
    output_tokens: int,
    concurrency: Sequence[int],
    rates: Sequence[float],
    num_requests: int | None,
    seed: int = 0,
) -> list[Workload]:
    """`num_requests`: of each load; None: four, or two for each of those that run at once."""
    make = partial(Workload, input_tokens=input_tokens, output_tokens=output_tokens, seed=seed)
    loads = [make(num_requests or max(_LEAST_REQUESTS, 2 * c), concurrency=c) for c in concurrency]
    loads += [make(num_requests or max(_LEAST_REQUESTS, round(30 * r)), rate=r) for r in rates]
    if not loads:
        raise UsageError("no load is asked for", hint="give a concurrency or a rate")
    return loads


def bench_engine(
    load: LoadModel,
    loads: Sequence[Workload],
    *,
    checkpoint: Path | None = None,
    random: str | None = None,
    weights: str = "nvfp4",
    kv_cache: str = "bf16",
    device: str | None = None,
    options: EngineOptions | None = None,
    progress: Progress | None = None,
) -> list[Row]:
    """A row for each of `loads`.

    checkpoint, random  a model folder, or the name of an architecture with random weights: one of the two
    weights             of a random model: "nvfp4" or "bf16"
    """
    if (checkpoint is None) == (random is None):
        raise UsageError("neither a checkpoint nor a random model, or both", hint="name one of them")
    if kv_cache not in KV_BYTES:
        raise UsageError(f"no cache in '{kv_cache}'", hint="there are " + ", ".join(KV_BYTES))
    place = torch.device(device or default_device())
    facts = describe(place)
    bandwidth = read_bandwidth(place)  # before the model takes the memory
    with _folder(checkpoint, random, weights) as folder:
        found = find_model(folder)
        stored = found.weights
        if stored is None:
            raise UsageError(f"{folder}: no weights lie there", hint="give a folder with safetensors, or use --random")
        model = load(folder, kv_cache, place)
    size = model.size if isinstance(model, ParallelModel) else 1
    if random is not None:
        drawn = draw_weights(model.decoder) + model.draw(0) if isinstance(model, ParallelModel) else draw_weights(model)
        if drawn < _LEAST_DRAWN * stored.num_bytes:
            raise EngineError(
                f"{drawn:,} bytes of weights were drawn, the model has {stored.num_bytes:,}",
                hint="this is a fault of the benchmark: it does not find the weights of this architecture",
            )
    subject = Subject(
        random or found.name,
        found.stored_format,
        kv_cache,
        facts.name if size == 1 else f"{size} x {facts.name}",
        bandwidth * (len(model.devices) if isinstance(model, ParallelModel) else 1),
        lambda sequences, context: decode_bytes(found.architecture, stored, kv_cache, sequences, context),
    )
    return bench_model(model, subject, loads, options, progress)


@contextmanager
def _folder(checkpoint: Path | None, random: str | None, weights: str) -> Iterator[Path]:
    if checkpoint is not None:
        yield checkpoint
        return
    assert random is not None
    with tempfile.TemporaryDirectory(prefix="blockscale-bench-") as name:
        write_hollow(Path(name), random_config(random), weights)
        yield Path(name)


def bench_model(
    model: Model,
    subject: Subject,
    loads: Sequence[Workload],
    options: EngineOptions | None = None,
    progress: Progress | None = None,
) -> list[Row]:
    """The same for a loaded model. All loads run in one engine, each after a few requests that are not timed."""
    longest = max(load.input_tokens + load.output_tokens for load in loads)
    if longest > model.context:
        raise UsageError(f"{longest} tokens of prompt and output: the model's context is {model.context}")
    most = max(load.concurrency or 0 for load in loads)
    options = options or EngineOptions()
    options = replace(
        options,
        max_running=max(options.max_running, most),
        max_step_tokens=max(options.max_step_tokens, most),
        max_context=longest,
        use_prefix_cache=False,  # what is timed is computed
    )
    engine = Engine(model, options)
    try:
        return [row(subject, *timed) for timed in _timed(engine, loads, progress)]
    finally:
        engine.close()


def _timed(
    engine: Engine, loads: Sequence[Workload], progress: Progress | None
) -> Iterator[tuple[Workload, Run, float | None]]:
    """Each load, its run, and the joules that it took."""
    model = engine.model
    joules = energy_meter(*(model.devices if isinstance(model, ParallelModel) else (model.device,)))
    for done, load in enumerate(loads):
        if progress is not None:
            progress("timing loads", done, len(loads))
        warm = replace(
            load,
            num_requests=load.concurrency or _LEAST_REQUESTS,
            output_tokens=min(_WARM_TOKENS, load.output_tokens),
            concurrency=load.concurrency or _LEAST_REQUESTS,
            rate=None,
            seed=load.seed + 1,
        )
        drive(engine, warm, model.vocab_size)
        before = joules() if joules is not None else 0.0
        run = drive(engine, load, model.vocab_size)
        spent = joules() - before if joules is not None else None
        engine.check_integrity()
        yield load, run, spent
    if progress is not None:
        progress("timing loads", len(loads), len(loads))
