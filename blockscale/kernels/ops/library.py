"""How an op becomes one of torch's: a schema, what it does, and the shapes that it gives."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blockscale.kernels.paged_cache import PagedCache

# The namespace is made once, when this file is first imported, and lasts as long as the process.
_LIBRARY = torch.library.Library("blockscale", "DEF")


def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Registers `torch.ops.blockscale.<name>` with its `schema` of arguments and results, and gives it back.

    run   what it does, on any device
    fake  empty tensors of the shapes and dtypes that `run` would give, for tracing
    """
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"blockscale::{name}", fake, lib=_LIBRARY)
    op: Callable[..., Any] = getattr(torch.ops.blockscale, name).default
    return op


def cache_parts(
    cache: PagedCache,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, str, torch.dtype]:
    """What stands for a cache among the arguments of an op, whose types are torch's."""
    return (
        cache.k,
        cache.v,
        cache.k_block_scale,
        cache.v_block_scale,
        cache.k_scale,
        cache.v_scale,
        cache.format.value,
        cache.dtype,
    )
