"""A process that computes beside the one that schedules: it has a part of the model, and does as it is told.

It ends when it is told to, when it fails, and when the process that started it is gone, in whatever it does then.
"""

import os
import shutil
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NoReturn

import torch
import torch.distributed as dist

from blockscale.engine.executor import Executor
from blockscale.engine.memory import measured_room
from blockscale.engine.orders import (
    Allocate,
    Answer,
    Draw,
    End,
    Job,
    Join,
    Logits,
    Measure,
    Run,
    as_batch,
    packed,
    receive,
)
from blockscale.errors import BlockscaleError, EngineError
from blockscale.models.decoder import Decoder
from blockscale.models.load import load_decoder
from blockscale.models.parallel import Group, join_group


def main() -> NoReturn:
    """Arguments: the descriptors of the connection, and of a pipe that is closed when the other process ends; the
    folder where the ranks find each other."""
    os.dup2(2, 1)  # stdout is the other process's, whose output may be data
    connection, lifeline, folder = Connection(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
    threading.Thread(target=_end_with, args=(lifeline, folder), daemon=True).start()
    code = 0
    try:
        _follow(connection)
    except (EOFError, OSError):
        code = 1
    except BaseException as e:
        hint = e.hint if isinstance(e, BlockscaleError) else ""
        what = str(e) if isinstance(e, BlockscaleError) else f"{type(e).__name__}: {e}"
        with suppress(OSError):
            connection.send_bytes(packed(Answer(error=(what, hint))))
        code = 1
    os._exit(code)  # not by way of destructors, which wait for ranks that may be gone


def _end_with(lifeline: int, folder: str) -> None:
    os.read(lifeline, 1)
    shutil.rmtree(folder, ignore_errors=True)  # a process that was killed leaves it
    os._exit(1)


def _follow(connection: Connection) -> None:
    job = receive(connection)
    assert isinstance(job, Job)
    device = torch.device(job.device)
    torch.set_num_threads(job.num_threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    connection.send_bytes(packed(Answer()))
    order = receive(connection)
    if not isinstance(order, Join):
        return
    group = join_group(dist.FileStore(job.store, job.shard.size), job.shard, device, job.timeout_s)
    decoder = load_decoder(
        job.path,
        device=device,
        dtype=job.dtype,
        kv_format=job.kv_format,
        emulate_activations=job.emulate_activations,
        is_long=job.is_long,
        shard=job.shard,
        group=group,
    )
    connection.send_bytes(packed(Answer()))
    with torch.inference_mode():
        _obey(connection, decoder, group)


def _obey(connection: Connection, decoder: Decoder, group: Group) -> None:
    device = decoder.device
    executor: Executor | None = None
    allocated = 0  # bytes before the first step over the caches
    while True:
        match receive(connection):
            case Run() as run:
                if executor is None:
                    raise EngineError("a batch came before its caches", hint="this is a fault of the engine")
                executor.run(as_batch(run))
            case Logits(num_rows):
                hidden = torch.empty(num_rows, decoder.config.hidden, dtype=decoder.dtype, device=device)
                decoder.logits(group.from_first(hidden))
            case Allocate(num_pages, page_size, use_graphs):
                executor = None
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats(device)
                executor = Executor(decoder, num_pages, page_size, use_graphs=use_graphs)
                allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
                connection.send_bytes(packed(Answer()))
            case Measure(memory_share):
                torch.cuda.synchronize(device)
                step_bytes = torch.cuda.max_memory_allocated(device) - allocated
                executor = None
                connection.send_bytes(packed(Answer(measured_room(device, memory_share, step_bytes))))
            case Draw(seed):
                from blockscale.engine.bench.random_model import draw_weights

                connection.send_bytes(packed(Answer(draw_weights(decoder, seed))))
            case End():
                return
