"""The pieces of work that make an output: each holds its own tensors in memory and nothing else, and they finish in
any order."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from blockscale.checkpoint.output import OutputFolder
from blockscale.checkpoint.source import SourceTensor

_MAX_WORKERS = 4
COPY_BYTES = 64 << 20  # what a tensor of any size takes at most that is copied: it goes in pieces
_HELD_BYTES = 512 << 20


@dataclass(frozen=True)
class Unit:
    """`num_bytes` of source tensors; `run` writes the result and returns what there is to tell of it."""

    name: str
    num_bytes: int
    held_bytes: int
    run: Callable[[], Any]


def run_units(units: Sequence[Unit]) -> Iterator[tuple[Unit, Any]]:
    """Runs the units on a few threads and yields each with what it returned, as they finish.

    One torch thread a worker: whole units side by side use the cores better than slices split between them. Together
    they hold no more than the largest unit does, or half a gigabyte.
    """
    workers = min(_MAX_WORKERS, os.cpu_count() or 1)
    limit = max([_HELD_BYTES, *(unit.held_bytes for unit in units)])
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    waiting, running = list(reversed(units)), dict[Future[Any], Unit]()
    try:
        while waiting or running:
            held = sum(unit.held_bytes for unit in running.values())
            while waiting and len(running) < workers and held + waiting[-1].held_bytes <= limit:
                held += waiting[-1].held_bytes
                unit = waiting.pop()
                running[pool.submit(unit.run)] = unit
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def copy_unit(tensor: SourceTensor, output: OutputFolder) -> Unit:
    """A tensor that is kept: byte for byte, or as the 16 bits that it stands for."""

    def run() -> None:
        if tensor.is_plain:
            output.copy(tensor.name, tensor.stored[0])
        else:
            output.write(tensor.name, tensor.read())

    held = min(tensor.num_bytes, COPY_BYTES) if tensor.is_plain else 2 * tensor.num_bytes
    return Unit(tensor.name, tensor.num_bytes, held, run)
