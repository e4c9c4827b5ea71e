"""A model divided among several devices of one host (tensor parallel): rank 0 is here, the others are processes.

Each step's batch goes to all of them; then every rank runs the same forward pass over its part of the weights and of
the cache, and they meet in `models.parallel`. Scheduling and sampling are rank 0's alone.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blockscale.checkpoint.reader import open_checkpoint
from blockscale.engine.executor import Executor
from blockscale.engine.graphs import DecodeGraphs
from blockscale.engine.model import Model
from blockscale.engine.orders import Allocate, Draw, Job, Join, Logits, Measure, as_run
from blockscale.engine.ranks import Ranks
from blockscale.errors import UsageError
from blockscale.kernels.paged_cache import KVFormat
from blockscale.models.batch import Batch
from blockscale.models.config import read_config
from blockscale.models.decoder import Decoder
from blockscale.models.load import load_decoder
from blockscale.models.parallel import Group, join_group
from blockscale.models.shard import Shard, check_parts

_TIMEOUT_S = 300.0  # one rank may build kernels while the others wait for it


@dataclass(frozen=True)
class ParallelModel:
    """decoder  rank 0's part"""

    decoder: Decoder
    group: Group
    ranks: Ranks

    @property
    def size(self) -> int:
        return self.group.shard.size

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Each once."""
        first = self.decoder.device
        if first.type != "cuda":
            return (first,)
        return tuple(torch.device("cuda", (first.index or 0) + rank) for rank in range(self.size))

    @property
    def identity(self) -> str:
        return self.decoder.identity

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    @property
    def context(self) -> int:
        return self.decoder.context

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def kv_format(self) -> KVFormat:
        return self.decoder.kv_format

    def page_bytes(self, page_size: int) -> int:
        """On one device; the same on all."""
        return self.decoder.page_bytes(page_size)

    def allocate(self, num_pages: int, page_size: int) -> Sequence[Any]:
        """Rank 0's."""
        return self.decoder.allocate(num_pages, page_size)

    def forward(self, batch: Batch, caches: Sequence[Any]) -> Tensor:
        """Rank 0's part, which the others wait for; see `ParallelExecutor`."""
        return self.decoder.forward(batch, caches)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> float32 [R, V]. RankError where a rank is gone."""
        with self.ranks.together():
            self.ranks.tell(Logits(hidden.shape[0]))
            return self.decoder.logits(self.group.from_first(hidden.contiguous()))

    def rooms(self, memory_share: float) -> list[int]:
        """Bytes that a cache may take on the other GPUs, after a step over caches that they drop now."""
        with self.ranks.together():
            self.ranks.tell(Measure(memory_share))
            return self.ranks.hear()

    def draw(self, seed: int) -> int:
        """Draws the other ranks' weights anew; their bytes."""
        with self.ranks.together():
            self.ranks.tell(Draw(seed))
            return sum(self.ranks.hear())

    def close(self) -> None:
        """Ends the processes."""
        self.ranks.close()


class ParallelExecutor:
    """An `Executor` on each rank, with the same pages."""

    def __init__(self, model: ParallelModel, num_pages: int, page_size: int, *, use_graphs: bool) -> None:
        self._ranks = model.ranks
        with self._ranks.together():
            self._ranks.tell(Allocate(num_pages, page_size, use_graphs))
            self._own = Executor(model.decoder, num_pages, page_size, use_graphs=use_graphs)
            self._ranks.hear()

    @property
    def caches(self) -> Sequence[Any]:
        """Rank 0's."""
        return self._own.caches

    @property
    def graphs(self) -> DecodeGraphs | None:
        return self._own.graphs

    def run(self, batch: Batch) -> Tensor:
        """As `Executor.run`. RankError where a rank is gone."""
        with self._ranks.together():
            self._ranks.tell(as_run(batch))
            return self._own.run(batch)

    def check(self) -> None:
        """RankError where a rank is gone: what it should have added to may be anything."""
        self._ranks.check()


def make_executor(model: Model, num_pages: int, page_size: int, *, use_graphs: bool) -> Executor | ParallelExecutor:
    if isinstance(model, ParallelModel):
        return ParallelExecutor(model, num_pages, page_size, use_graphs=use_graphs)
    return Executor(model, num_pages, page_size, use_graphs=use_graphs)


def load_parallel(
    path: Path,
    size: int,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    kv_format: KVFormat | None = None,
    emulate_activations: bool = False,
    is_long: bool = False,
) -> ParallelModel:
    """The model in `path` on `size` devices: GPUs from `device` on, or processes on the CPU.

    The rest as in `load_decoder`. UsageError where there are not so many GPUs, or the model cannot be cut so;
    EngineError where a process fails.
    """
    first = torch.device(device)
    devices = _devices(first, size)
    check_parts(read_config(open_checkpoint(path).folder.config, is_long=is_long), size)
    folder = tempfile.mkdtemp(prefix="blockscale-ranks-")
    jobs = [
        Job(
            path.resolve(),
            devices[rank],
            dtype,
            kv_format,
            emulate_activations,
            is_long,
            Shard(rank, size),
            store=str(Path(folder) / "store"),
            num_threads=max(1, torch.get_num_threads() // size),
            timeout_s=_TIMEOUT_S,
        )
        for rank in range(size)
    ]
    ranks = Ranks(jobs[1:], folder)
    try:
        return _load(jobs[0], ranks)
    except BaseException:
        ranks.close(at_once=True)
        raise


def _load(job: Job, ranks: Ranks) -> ParallelModel:
    place = torch.device(job.device)
    with ranks.together():
        ranks.tell(Join())
        group = join_group(dist.FileStore(job.store, job.shard.size), job.shard, place, job.timeout_s)
    if place.type == "cuda":
        ranks.on_end(group.abort)
    decoder = load_decoder(
        job.path,
        device=place,
        dtype=job.dtype,
        kv_format=job.kv_format,
        emulate_activations=job.emulate_activations,
        is_long=job.is_long,
        shard=job.shard,
        group=group,
    )
    with ranks.together():
        ranks.hear()
    return ParallelModel(decoder, group, ranks)


def _devices(first: torch.device, size: int) -> list[str]:
    if size < 2:
        raise UsageError(f"tensor_parallel {size}: a model is divided among 2 devices or more")
    if first.type != "cuda":
        return [str(first)] * size
    begin, count = first.index or 0, torch.cuda.device_count()
    if begin + size > count:
        raise UsageError(
            f"tensor_parallel {size} from {first} on: this host has {count} GPUs",
            hint="ask for fewer, or see CUDA_VISIBLE_DEVICES",
        )
    return [f"cuda:{begin + rank}" for rank in range(size)]
