"""What is wrong with a checkpoint on disk, as data: reading stops at the first fatal fault, lint shows them all."""

from collections.abc import Iterable
from dataclasses import dataclass

from blockscale.errors import CheckpointError


@dataclass(frozen=True)
class Fault:
    """One contradiction between files, config and tensors.

    rule      name of the lint rule that it breaks, as in `blockscale.inspection.rules`
    where     the file, module or tensor
    is_fatal  whether the checkpoint cannot be read with it
    tensors   names of the stored tensors that are wrong, where `where` does not say which
    """

    rule: str
    where: str
    message: str
    hint: str = ""
    is_fatal: bool = True
    tensors: tuple[str, ...] = ()


def raise_first(faults: Iterable[Fault]) -> None:
    """CheckpointError for the first fatal fault."""
    for fault in faults:
        if fault.is_fatal:
            raise CheckpointError(fault.message, hint=fault.hint)
