"""What the devices of one host say to each other in a forward pass, each with a part of the model (tensor parallel).

    attention, feed-forward   a rank's heads, a rank's inner width: the results of all ranks are summed
    embedding                 rows of a rank's tokens, zeros for the others': summed
    head                      logits of a rank's part of the vocabulary: set side by side

Every rank comes to the same numbers, bit for bit, since a sum is made once and handed to all: routers then choose the
same experts everywhere. Sums are in the dtype of what is summed.

NCCL on GPUs, gloo on the CPU. The groups are objects of their own, so that a process may have several.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blockscale.errors import MissingDependencyError
from blockscale.models.layers import Product
from blockscale.models.shard import Part, Shard


@dataclass(frozen=True)
class Group:
    """The ranks of one model. All must call the same in the same order, with tensors of the same shape.

    backend  torch's, for the device that tensors lie on
    """

    shard: Shard
    backend: Any

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in the memory of x where that is contiguous."""
        x = x.contiguous()
        options = dist.AllreduceOptions()
        options.asyncOp = False
        _wait(self.backend.allreduce([x], options))
        return x

    def beside(self, x: Tensor) -> Tensor:
        """[R, n] of each rank -> [R, size * n]."""
        rows, n = x.shape
        out = x.new_empty(self.shard.size * rows, n)
        _wait(self.backend._allgather_base(out, x.contiguous()))
        return out.view(self.shard.size, rows, n).transpose(0, 1).flatten(1)

    def from_first(self, x: Tensor) -> Tensor:
        """x of rank 0, in the memory of x, which is contiguous."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        _wait(self.backend.broadcast([x], options))
        return x

    def abort(self) -> None:
        """Ends what waits for a rank that does not come, from any thread. The group is of no use then."""
        if hasattr(self.backend, "abort"):
            self.backend.abort()


def join_group(store: Any, shard: Shard, device: torch.device, timeout_s: float) -> Group:
    """The group of all ranks that meet in `store` (torch.distributed's). MissingDependencyError without NCCL."""
    timeout = timedelta(seconds=timeout_s)
    if device.type != "cuda":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # what torch's own code makes
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timeout
        return Group(shard, dist.ProcessGroupGloo(store, shard.rank, shard.size, options))
    if not dist.is_nccl_available():
        raise MissingDependencyError("this torch has no NCCL, which several GPUs need", hint="install torch for CUDA")
    settings = dist.ProcessGroupNCCL.Options()
    settings._timeout = timeout
    with torch.cuda.device(device):
        group = Group(shard, dist.ProcessGroupNCCL(store, shard.rank, shard.size, settings))
        group.sum(torch.zeros(1, device=device))  # now, and not in the middle of a graph, it finds the others
    return group


@dataclass(frozen=True)
class Summed:
    """A product whose inputs are cut: x [T, part of K] of each rank -> [T, N], the same on all."""

    product: Product
    group: Group

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.sum(self.product(x))


def embed(table: Tensor, ids: Tensor, part: Part, dtype: torch.dtype, group: Group | None) -> Tensor:
    """[T, hidden] in `dtype` of tokens int64 [T], from the rows `part` of the embedding."""
    if group is None:
        return table[ids].to(dtype)
    place = ids - part.begin
    is_own = (place >= 0) & (place < part.size)
    if part.size == 0:
        return group.sum(torch.zeros(len(ids), table.shape[1], dtype=dtype, device=ids.device))
    rows = table[place.clamp(0, part.size - 1)].to(dtype)
    return group.sum(torch.where(is_own.unsqueeze(1), rows, torch.zeros((), dtype=dtype, device=rows.device)))


def all_logits(logits: Tensor, part: Part, group: Group | None) -> Tensor:
    """[R, V] of a rank's [R, part.size]."""
    if group is None:
        return logits
    each = -(-part.whole // group.shard.size)
    if part.size < each:
        logits = torch.nn.functional.pad(logits, (0, each - part.size))
    return group.beside(logits)[:, : part.whole]


def _wait(work: Any) -> None:
    if work is not None:  # what ran on the caller's stream leaves nothing to wait for
        work.wait()
