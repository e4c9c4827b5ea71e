"""A GPU that is held below its TDP: arithmetic slows with the clock, reading memory where it draws more than is left.

    share    = (limit - idle) / (TDP - idle)
    clock    = share^1/2, from share to share^1/3
    reading  = (limit - idle) / what reading draws on top of idle, at most 1

A chip that multiplies draws its whole TDP. Power goes with the clock and the square of the voltage: clock = share where
the voltage stays, share^1/3 where it falls as the clock does; real chips lie between. Memory keeps its own clock, up to
where the limit is less than reading takes; from there on it is taken to slow in proportion, so that no energy is saved
by a speed that nobody has seen. Only one published system was run so (8 x H200 at 500 W): it lies inside the interval.
"""

import math
from dataclasses import replace

from blockscale.errors import UsageError
from blockscale.planning.hardware.catalogue import Figure, Gpu


def with_power_limit(gpu: Gpu, watts: float | None, idle_share: float, memory_share: float) -> Gpu:
    """The GPU as it is under a limit of its board's power. Shares of TDP: `idle_share` without work, `memory_share` on
    top of it while reading.

    UsageError for a limit at which it cannot work, and for a GPU whose TDP is not known.
    """
    if watts is None:
        return gpu
    if gpu.tdp_watts is None:
        raise UsageError(f"{gpu.name}: its power is not known", hint="tdp_watts in a file: --gpu my.toml")
    tdp = gpu.tdp_watts.value
    if not idle_share * tdp < watts < math.inf:
        raise UsageError(
            f"--power-limit {watts:g}: {gpu.name} draws {idle_share * tdp:.0f} W without work",
            hint=f"more than that, up to its TDP of {tdp:.0f} W",
        )
    if watts >= tdp:
        return gpu
    share = (watts - idle_share * tdp) / (tdp - idle_share * tdp)
    clock = Figure(math.sqrt(share), share, math.cbrt(share))
    peaks = {
        name: Figure(peak.value * clock.value, peak.low * clock.low, peak.high * clock.high)
        for name, peak in gpu.peaks.items()
    }
    reading = min(1.0, (watts - idle_share * tdp) / (memory_share * tdp)) if memory_share else 1.0
    full = gpu.bandwidth
    bandwidth = Figure(full.value * reading, full.low * reading, full.high)
    return replace(gpu, name=f"{gpu.name} at {watts:g} W", peaks=peaks, bandwidth=bandwidth)
