"""How an op becomes one of torch's: a schema, what it does, and the shapes that it gives."""

from collections.abc import Callable
from typing import Any

import torch

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
