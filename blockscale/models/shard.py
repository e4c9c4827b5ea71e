"""Which part of a model one of several devices holds (tensor parallel). Needs no torch.

Attention is cut by heads, feed-forward layers and experts by their inner width, embedding and head by the vocabulary.
What has no such dimension - norms, routers, the latent of multi-head latent attention - is on every device.
"""

from dataclasses import dataclass, replace

from blockscale.errors import UsageError
from blockscale.models.config import DecoderConfig

_BLOCKS = (32, 16)  # of scales, which stay whole; in 32 both NVFP4's and MXFP4's do


@dataclass(frozen=True)
class Part:
    """begin .. end - 1 of a dimension that has `whole` in all."""

    begin: int
    end: int
    whole: int

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def is_whole(self) -> bool:
        return self.size == self.whole

    def times(self, count: int) -> "Part":
        """The same where each has `count` entries: heads as rows."""
        return Part(self.begin * count, self.end * count, self.whole * count)

    def within(self, begin: int, whole: int) -> "Part":
        """The same in a larger dimension, in which this one begins at `begin`."""
        return Part(begin + self.begin, begin + self.end, whole)


@dataclass(frozen=True)
class Shard:
    """The `rank`-th of `size` parts of a model. The cuts raise UsageError for a dimension that has no such parts."""

    rank: int = 0
    size: int = 1

    def heads(self, whole: int) -> Part:
        if whole % self.size:
            raise _uncuttable("query heads", whole, self.size)
        return self._even(whole)

    def kv_heads(self, whole: int) -> Part:
        """Where there are fewer than ranks, several ranks have the same."""
        if whole % self.size == 0:
            return self._even(whole)
        if self.size % whole:
            raise _uncuttable("key and value heads", whole, self.size)
        head = self.rank * whole // self.size
        return Part(head, head + 1, whole)

    def width(self, what: str, whole: int) -> Part:
        """Of a feed-forward layer, in whole blocks of 32 or 16, of which the first ranks have one more where they do
        not divide."""
        if self.size == 1:
            return Part(0, whole, whole)
        for block in _BLOCKS:
            count = whole // block
            if whole % block == 0 and count >= self.size:
                each, more = divmod(count, self.size)
                begin = self.rank * each + min(self.rank, more)
                return Part(begin * block, (begin + each + (self.rank < more)) * block, whole)
        raise _uncuttable(what, whole, self.size)

    def vocabulary(self, whole: int) -> Part:
        """What the last rank lacks lies at the end."""
        each = -(-whole // self.size)
        return Part(min(self.rank * each, whole), min((self.rank + 1) * each, whole), whole)

    def _even(self, whole: int) -> Part:
        each = whole // self.size
        return Part(self.rank * each, (self.rank + 1) * each, whole)


WHOLE = Shard()


def of_rank(config: DecoderConfig, shard: Shard) -> DecoderConfig:
    """The config of what one rank holds, as far as caches and attention see it. UsageError as above."""
    heads = shard.heads(config.num_heads).size
    if config.latent is not None:
        return replace(config, num_heads=heads)  # the latent is on every rank
    return replace(config, num_heads=heads, num_kv_heads=shard.kv_heads(config.num_kv_heads).size)


def check_parts(config: DecoderConfig, size: int) -> None:
    """UsageError, before anything is loaded, for a model that cannot be cut into so many parts."""
    shard = Shard(0, size)
    of_rank(config, shard)
    layers = range(config.num_layers)
    if config.moe is None or any(layer not in config.moe.layers for layer in layers):
        shard.width("width of feed-forward layers", config.inner)
    if config.moe is not None:
        shard.width("inner width of experts", config.moe.inner)
        if config.moe.shared_inner:
            shard.width("width of shared experts", config.moe.shared_inner)


def _uncuttable(what: str, whole: int, size: int) -> UsageError:
    return UsageError(
        f"{whole} of the model ({what}) cannot be cut into {size} parts",
        hint="tensor_parallel: choose a smaller number, or one that divides it",
    )
