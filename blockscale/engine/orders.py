"""What the process that schedules tells those that compute beside it (tensor parallel), and how it is sent."""

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blockscale.kernels.paged_cache import KVFormat
from blockscale.models.batch import Batch
from blockscale.models.shard import Shard


@dataclass(frozen=True)
class Job:
    """What a process loads, and where; said once, before anything else.

    store        file by which the ranks find each other
    num_threads  of its CPU work
    timeout_s    that one rank waits for another in the middle of a step
    """

    path: Path
    device: str
    dtype: torch.dtype | None
    kv_format: KVFormat | None
    emulate_activations: bool
    is_long: bool
    shard: Shard
    store: str
    num_threads: int
    timeout_s: float


@dataclass(frozen=True)
class Join:
    """All are there: form the group, load the weights, answer."""


@dataclass(frozen=True)
class Allocate:
    """Caches of so many pages, in place of those there were; answer."""

    num_pages: int
    page_size: int
    use_graphs: bool


@dataclass(frozen=True)
class Run:
    """Compute this batch: its tensors as arrays, in the order of `Batch`."""

    arrays: tuple[np.ndarray, ...]
    max_query: int
    is_decode: bool


@dataclass(frozen=True)
class Logits:
    """Take part in the logits of so many rows, which rank 0 hands out."""

    num_rows: int


@dataclass(frozen=True)
class Measure:
    """Answer with the bytes that a cache may take, after what was computed since `Allocate`; drop the caches."""

    memory_share: float


@dataclass(frozen=True)
class Draw:
    """Draw all weights anew (a benchmark's random model); answer with their bytes."""

    seed: int


@dataclass(frozen=True)
class End:
    """There is nothing more to do."""


Order = Join | Allocate | Run | Logits | Measure | Draw | End


@dataclass(frozen=True)
class Answer:
    """error  why it could not be done, and a hint; the process has ended then"""

    value: Any = None
    error: tuple[str, str] | None = None


def as_run(batch: Batch) -> Run:
    """Of a batch on the host."""
    tensors = (batch.token_ids, batch.positions, batch.cu_seqlens, batch.lengths, batch.page_table, batch.slots)
    return Run(tuple(tensor.numpy() for tensor in tensors), batch.max_query, batch.is_decode)


def as_batch(run: Run) -> Batch:
    tokens, positions, bounds, lengths, table, slots = (torch.from_numpy(array) for array in run.arrays)
    return Batch(tokens, positions, bounds, lengths, table, slots, run.max_query, run.is_decode)


def packed(message: Job | Order | Answer) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def receive(connection: Connection) -> Any:
    """The next message. EOFError or OSError where the other side has gone."""
    return pickle.loads(connection.recv_bytes())
