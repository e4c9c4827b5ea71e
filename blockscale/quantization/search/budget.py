"""What a mixed recipe may cost, as its user says it."""

import math
import re
from dataclasses import dataclass

from blockscale.errors import UsageError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?i?)b?", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """One limit, and what it is meant for.

    bits       a weight of the searched linears on average; scales of blocks count, scales of tensors do not
    num_bytes  of all weight files, and of the KV cache of one sequence where `context` is given
    max_kl     nats a token between the 16-bit model and the result
    itl_ms     predicted milliseconds between tokens on `gpus` of `gpu`
    joules     predicted at the wall, an output token, there
    context    tokens of a sequence: the KV cache's format is searched for, too. Half of them are prompt where latency
               or energy is predicted (without it: of 2048, or what the model reads)
    concurrency  requests in flight, for latency and energy
    """

    bits: float | None = None
    num_bytes: int | None = None
    max_kl: float | None = None
    itl_ms: float | None = None
    joules: float | None = None
    gpu: str | None = None
    gpus: int = 1
    concurrency: int = 1
    context: int | None = None

    def __post_init__(self) -> None:
        limits = self._limits
        if len(limits) != 1:
            given = ", ".join(limits) or "none"
            raise UsageError(f"a search has one budget, and here are {given}", hint="give one of " + ", ".join(_NAMES))
        name, value = next(iter(limits.items()))
        if not (value > 0 and math.isfinite(value)):
            raise UsageError(f"{name} {value}: a budget is a positive number", hint="give a positive number")
        if self.is_predicted and self.gpu is None:
            raise UsageError(f"{name} needs to know the GPU", hint="give --gpu NAME")
        if not self.is_predicted and (self.gpu is not None or self.gpus != 1 or self.concurrency != 1):
            raise UsageError(f"{name} does not depend on a GPU", hint="--gpu goes with --itl-ms or --joules")
        if self.bits is not None and self.context is not None:
            raise UsageError("--bits counts weights, and --context the KV cache", hint="give --bytes, or --kv-cache")
        for what, number in (("--gpus", self.gpus), ("--concurrency", self.concurrency), ("--context", self.context)):
            if number is not None and number < (2 if what == "--context" else 1):
                raise UsageError(f"{what} {number} is too small", hint="give a positive number")

    @property
    def _limits(self) -> dict[str, float]:
        values = (self.bits, self.num_bytes, self.max_kl, self.itl_ms, self.joules)
        return {name: value for name, value in zip(_NAMES, values, strict=True) if value is not None}

    @property
    def name(self) -> str:
        """The option's."""
        return next(iter(self._limits))

    @property
    def limit(self) -> float:
        return next(iter(self._limits.values()))

    @property
    def is_predicted(self) -> bool:
        """Whether the planner says what a mixture costs."""
        return self.itl_ms is not None or self.joules is not None

    def said(self, value: float) -> str:
        """A value of this budget with its unit."""
        if self.num_bytes is not None:
            return f"{value / 1e9:.4f} GB" if value >= 1e9 else f"{value:,.0f} bytes"
        unit = {"--bits": "bits", "--max-kl": "nats", "--itl-ms": "ms", "--joules": "J"}[self.name]
        return f"{value:.4g} {unit}"


_NAMES = ("--bits", "--bytes", "--max-kl", "--itl-ms", "--joules")


def parse_size(text: str) -> int:
    """`20GB`, `1.5 GiB`, `800m` or plain bytes. UsageError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"'{text}' is no size", hint="for example 20GB, 1.5GiB or a number of bytes")
    unit = match["unit"].lower()
    if unit == "i":
        raise UsageError(f"'{text}' is no size", hint="for example 20GB, 1.5GiB or a number of bytes")
    return int(float(match["number"]) * {**_UNITS, **_BINARY}[unit])
