"""Power and energy at three boundaries: the GPUs' boards, the servers at the wall, the building.

    board     = idle + TDP x (shares of a step's time, each by what it draws), never above TDP or a power limit
    wall      = (board + CPUs, memory, NICs, switches + fans) / power supplies' efficiency
    facility  = wall x PUE

Reading memory draws 64 to 72 % of TDP on top of idle and multiplying more than a board may draw (measured on an H200:
benchmarks/results/board_power.json). What the server adds is fitted to wall power that MLPerf's logs hold. Energy of
reading and of arithmetic adds up, even where their times overlap.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from blockscale.errors import UsageError
from blockscale.planning.hardware.catalogue import Gpu
from blockscale.planning.money.assumptions import Assumptions, load_assumptions
from blockscale.planning.speed.predict import Estimate, Prediction
from blockscale.planning.speed.roofline import Deployment, Step

# What power and energy mean by each name. Joules a token are at the wall unless another is named.
BOUNDARIES: Mapping[str, str] = {
    "board": "what the GPUs' boards draw",
    "wall": "the servers at the wall, or this deployment's share of them: boards, CPUs, memory, network cards, fans, "
    "power supplies",
    "facility": "wall times PUE: with cooling and distribution of the building",
}

# Half the 80 % interval, as a natural logarithm. Estimates: the three measured systems lie within 5 %, but the figures
# above were fitted to them, and three are few.
_DYNAMIC_SPREAD = 0.15  # of what a board draws above idle
_SERVER_SPREAD = 0.08  # of what servers add


@dataclass(frozen=True)
class Power:
    """Watts of the whole deployment while it serves, and at idle with the model loaded.

    is_limited  the boards would draw more, and TDP or the power limit holds them
    """

    num_gpus: int
    board_watts: Estimate
    wall_watts: Estimate
    facility_watts: Estimate
    idle_wall_watts: float
    pue: float
    cooling: str
    is_limited: bool

    def watts(self, boundary: str) -> Estimate:
        """By name. UsageError for others."""
        by_name = {"board": self.board_watts, "wall": self.wall_watts, "facility": self.facility_watts}
        if boundary not in by_name:
            raise UsageError(f"unknown boundary '{boundary}'", hint="board, wall or facility")
        return by_name[boundary]

    def joules_per_token(self, tokens_per_s: Estimate, boundary: str = "wall") -> Estimate:
        """Of the deployment that makes `tokens_per_s` in all."""
        return ratio(self.watts(boundary), tokens_per_s)


@dataclass(frozen=True)
class Racks:
    """What has to be provided: nameplate power, not what is drawn on average.

    gpus_per_rack  that one rack can feed and cool, whole servers
    kw             nameplate of the servers in them, low and high where sources differ
    kw_per_rack    of a full rack, at most
    """

    num_racks: int
    num_servers: int
    gpus_per_rack: int
    kw: Estimate
    kw_per_rack: float
    cooling: str
    unit: str


def power(d: Deployment, prediction: Prediction, assumptions: Assumptions | None = None) -> Power:
    """While the predicted load is served; few requests let GPUs stand still between them, or stages of a pipeline.

    UsageError for a GPU whose TDP is not known.
    """
    a = assumptions or load_assumptions()
    tdp = _tdp(d.gpu)
    limit = min(tdp, a.gpu_power_limit_watts or tdp)
    idle = min(a.gpu_idle_share * tdp, limit)
    serving = prediction.serving
    dynamic = tdp * _dynamic_share(serving.step, serving.itl_s, a) * serving.busy * _duty(d, prediction)
    wanted = Estimate(
        idle + dynamic, idle + dynamic * math.exp(-_DYNAMIC_SPREAD), idle + dynamic * math.exp(_DYNAMIC_SPREAD)
    )
    board = Estimate(min(wanted.value, limit), min(wanted.low, limit), min(wanted.high, limit))
    n, cooling = d.layout.num_gpus, cooling_of(d.gpu, a)
    wall = Estimate(
        _wall(board.value, d.gpu, cooling, a),
        _wall(board.low, d.gpu, cooling, a) * math.exp(-_SERVER_SPREAD),
        _wall(board.high, d.gpu, cooling, a) * math.exp(_SERVER_SPREAD),
    )
    pue = a.pue_liquid if cooling == "liquid" else a.pue_air
    return Power(
        num_gpus=n,
        board_watts=board.scaled(n),
        wall_watts=wall.scaled(n),
        facility_watts=wall.scaled(n * pue),
        idle_wall_watts=n * _wall(idle, d.gpu, cooling, a),
        pue=pue,
        cooling=cooling,
        is_limited=wanted.value > limit,
    )


def _dynamic_share(step: Step, itl_s: float, a: Assumptions) -> float:
    """Mean draw above idle, as a share of TDP."""
    seconds = (
        (step.weights + step.cache) * a.memory_power_share
        + step.compute * a.compute_power_share
        + step.communication * a.communication_power_share
    )
    return seconds / itl_s


def served_tokens_per_s(d: Deployment, prediction: Prediction) -> Estimate:
    """Output tokens a second of all GPUs."""
    return prediction.tokens_per_s_per_gpu.scaled(d.layout.num_gpus)


def _duty(d: Deployment, prediction: Prediction) -> float:
    """Share of the time that there is anything to decode: predictions hold one sequence at least."""
    if prediction.sequences > 1 + 1e-6:  # found by halving
        return 1.0
    possible = prediction.serving.tokens_per_s * d.layout.replicas
    return min(1.0, served_tokens_per_s(d, prediction).value / possible)


def _tdp(gpu: Gpu) -> float:
    if gpu.tdp_watts is None:
        raise UsageError(f"{gpu.name}: its power is not known", hint="tdp_watts in a file: --gpu my.toml")
    return gpu.tdp_watts.value


def _wall(board: float, gpu: Gpu, cooling: str, a: Assumptions) -> float:
    """Watts at the wall per GPU. Never above the nameplate of the system that the GPU is sold in."""
    server = min(a.server_watts_per_gpu, a.server_share_of_tdp * _tdp(gpu))
    fans = a.fan_share_liquid if cooling == "liquid" else a.fan_share_air
    watts = (board + server) * (1 + fans) / a.power_supply_efficiency_share
    return min(watts, gpu.system_kw.high * 1e3 / gpu.system_gpus) if gpu.system_kw else watts


def cooling_of(gpu: Gpu, a: Assumptions) -> str:
    """Air wherever the GPU is sold with air, unless the assumptions say otherwise."""
    if a.cooling != "auto":
        return a.cooling
    return "liquid" if "liquid" in gpu.cooling and not gpu.cooling.startswith("air") else "air"


def ratio(above: Estimate, below: Estimate) -> Estimate:
    """Of two estimates whose errors have nothing to do with each other: their logarithms' widths add in square."""
    value = above.value / below.value
    down = math.hypot(math.log(above.value / above.low), math.log(below.high / below.value))
    up = math.hypot(math.log(above.high / above.value), math.log(below.value / below.low))
    return Estimate(value, value * math.exp(-down), value * math.exp(up))


def joules_per_output_token(p: Power, tokens_per_s_per_gpu: Estimate, boundary: str = "wall") -> Estimate:
    """All energy, that of prompts too, over the tokens that come out."""
    return p.joules_per_token(tokens_per_s_per_gpu.scaled(p.num_gpus), boundary)


def racks(gpu: Gpu, num_gpus: int, assumptions: Assumptions | None = None) -> Racks:
    """Racks for so many GPUs: a rack-scale system whole, others as many servers as a rack can feed and cool."""
    a = assumptions or load_assumptions()
    cooling = cooling_of(gpu, a)
    per_server = gpu.system_gpus if gpu.system_name else a.gpus_per_server
    kw = server_kw(gpu, a)
    servers = math.ceil(num_gpus / per_server)
    if is_rack(gpu):
        return Racks(servers, servers, per_server, kw.scaled(servers), kw.high, cooling, gpu.system_name)
    limit = a.liquid_rack_kw if cooling == "liquid" else a.air_rack_kw
    in_rack = int(limit / kw.value)
    if in_rack < 1:
        raise UsageError(
            f"one server of {gpu.name} takes {kw.value:.1f} kW, and a rack gives {limit:g} kW ({cooling})",
            hint=f"raise {cooling}_rack_kw in --assumptions" + ("" if cooling == "liquid" else ", or cooling: liquid"),
        )
    full = min(in_rack, servers)
    unit = gpu.system_name or f"server of {per_server}"
    return Racks(
        math.ceil(servers / in_rack), servers, in_rack * per_server, kw.scaled(servers), full * kw.high, cooling, unit
    )


_RACK_GPUS = 36  # the least of a rack-scale system (NVL36); servers have 8 or 16


def is_rack(gpu: Gpu) -> bool:
    """Whether it is sold as a whole rack only."""
    return gpu.system_gpus >= _RACK_GPUS


def server_kw(gpu: Gpu, a: Assumptions) -> Estimate:
    """Nameplate of the system, or what its parts draw at most where no nameplate is known."""
    if gpu.system_kw is not None:
        return Estimate(gpu.system_kw.value, gpu.system_kw.low, gpu.system_kw.high)
    per_server = gpu.system_gpus if gpu.system_name else a.gpus_per_server
    watts = gpu.all_in_kw * 1e3 if gpu.all_in_kw else _wall(_tdp(gpu), gpu, cooling_of(gpu, a), a)
    return Estimate(*(watts * per_server / 1e3,) * 3)
