"""Several ranks of one model in one process: a thread each, over gloo."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from blockscale.models.decoder import Decoder
from blockscale.models.load import load_decoder
from blockscale.models.parallel import Group, join_group
from blockscale.models.shard import Shard

Result = TypeVar("Result")
_TIMEOUT_S = 60.0


def on_ranks(size: int, work: Callable[[Group], Result]) -> list[Result]:
    """What `work` returns on each rank; the first error is raised."""
    store = dist.HashStore()
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(join_group(store, Shard(rank, size), torch.device("cpu"), _TIMEOUT_S))
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


def decoders(path: Path, size: int, work: Callable[[Decoder], Result], **options: Any) -> list[Result]:
    """What `work` makes of each rank's part of the model in `path`."""

    def load(group: Group) -> Result:
        return work(load_decoder(path, shard=group.shard, group=group, **options))

    return on_ranks(size, load)
