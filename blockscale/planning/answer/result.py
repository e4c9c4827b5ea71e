"""What `plan` answers, as one frozen value, and as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockscale.errors import CheckFailed
from blockscale.planning.answer.choice import Choice
from blockscale.planning.answer.language import language
from blockscale.planning.money.assumptions import Record
from blockscale.planning.money.bill import Bill
from blockscale.planning.money.energy import BOUNDARIES
from blockscale.planning.speed.diffusion import ImagePrediction, ImageRequest
from blockscale.planning.speed.memory import MemoryPlan
from blockscale.planning.speed.native import FormatUse
from blockscale.planning.speed.predict import Estimate, Workload


@dataclass(frozen=True)
class Bound:
    """A term of a step: its own time, its share of the step, and how often it fits into the largest term."""

    name: str
    ms: float
    share: float
    times_away: float


@dataclass(frozen=True)
class CurvePoint:
    """One point of throughput against latency: so many sequences decoded together, per replica."""

    sequences: int
    itl_ms: Estimate
    ttft_ms: Estimate
    tokens_per_s_per_gpu: Estimate


@dataclass(frozen=True)
class PartRow:
    """Weights of one part of the model, over all its GPUs."""

    name: str
    format: str
    num_bytes: int


@dataclass(frozen=True)
class Notice:
    """Something to know; `key` of the language files, with what is filled in: numbers are written as each language has
    them."""

    key: str
    values: Mapping[str, str | float]


@dataclass(frozen=True)
class Target:
    """A latency that was asked for. `is_sure`: met at the unfavourable end of the 80 % interval, too."""

    name: str
    limit_ms: float
    is_met: bool
    is_sure: bool
    must_be_sure: bool = False

    @property
    def is_reached(self) -> bool:
        return self.is_sure if self.must_be_sure else self.is_met


@dataclass(frozen=True)
class Found:
    """A configuration that meets the targets: with as many replicas as the workload needs.

    batch           sequences decoded together by a replica
    is_sure         the targets hold at the unfavourable ends of the 80 % intervals, too
    is_best         no other that was found is better in one of objective, ITL and GPUs and as good in the others
    """

    choice: Choice
    batch: float
    itl_ms: Estimate
    ttft_ms: Estimate
    tokens_per_s: Estimate
    is_sure: bool
    cost_per_million_tokens: Estimate | None = None
    joules_per_output_token: Estimate | None = None
    is_best: bool = False

    @property
    def num_gpus(self) -> int:
        return self.choice.layout.num_gpus

    def figure(self, objective: str) -> float | None:
        """Of an objective; None where it is not known."""
        if objective == "gpus":
            return float(self.num_gpus)
        known = {"cost": self.cost_per_million_tokens, "energy": self.joules_per_output_token}[objective]
        return None if known is None else known.value


_PROPORTION = 4  # times the best: nobody pays more for a quicker token


@dataclass(frozen=True)
class SearchResult:
    """`found`: best first. `tried`: configurations that were looked at.

    nearest_miss  where no single request meets the targets, the one that comes closest, and by what factor it misses
    enough        where the GPUs that were asked for are too few, the fewest that are enough
    unranked      GPUs that meet the targets, and of which no price (or power) is known
    is_met_once   whether any meets the targets with one request in flight
    """

    found: tuple[Found, ...]
    tried: int
    objective: str
    nearest_miss: tuple[Choice, float] | None
    enough: Found | None = None
    unranked: tuple[str, ...] = ()
    is_met_once: bool = True

    def shown(self, most: int = 12) -> tuple[Found, ...]:
        """The best ones, and beyond them those that are quicker and not out of all proportion."""
        best = self.found[0].figure(self.objective) if self.found else None
        return tuple(
            found
            for i, found in enumerate(self.found)
            if i < most or (found.is_best and (found.figure(self.objective) or 0) <= _PROPORTION * (best or 0))
        )


@dataclass(frozen=True)
class PlanResult:
    """Everything that `plan` knows about one configuration. Predicted figures are None where it does not fit.

    missing_bytes          that each GPU lacks for one sequence; 0 where it fits
    nearest                configurations close to this one that do fit, closest first
    kv_bytes_per_token     that one more token adds, over all layers and GPUs of a replica, once windows are full
    kv_bytes_per_sequence  of windows and recurrent states, whatever the length
    max_sequences          of the workload's length that are admitted, over all replicas
    limit                  what holds the number of sequences: memory, engine, or requests
    waiting                requests in flight that are not admitted
    utilization            of what could be served at a rate; from 1 on the queue grows without end
    enough                 at a rate that is too high, the same with as many replicas as can serve it
    capacity_per_gpu       at a rate, output tokens a second that could be made at most
    bound                  what a token's time goes to first
    bill                   power, energy, racks and cost, where they are known
    priors                 what the predictions are fitted to
    image_request          of a diffusion transformer, which generates no tokens; `image`: what an image takes
    search                 what else was found, where targets were searched for
    compared               other configurations under the same workload
    """

    model: str
    num_parameters: int
    active_parameters: int
    origin: str
    choice: Choice
    engine: str | None
    workload: Workload
    fits: bool
    missing_bytes: float
    nearest: tuple[Choice, ...]
    weights_bytes: int
    weights_are_exact: bool
    parts: tuple[PartRow, ...]
    formats: tuple[FormatUse, ...]
    memory: MemoryPlan
    kv_bytes_per_token: float
    kv_bytes_per_sequence: float
    max_sequences: int
    limit: str
    sequences: float | None
    waiting: float | None
    utilization: float | None
    ttft_ms: Estimate | None
    itl_ms: Estimate | None
    output_tokens_per_s_per_gpu: Estimate | None
    capacity_per_gpu: Estimate | None
    enough: Choice | None
    bound: str | None
    decode_bounds: tuple[Bound, ...]
    prefill_bounds: tuple[Bound, ...]
    curve: tuple[CurvePoint, ...]
    targets: tuple[Target, ...]
    bill: Bill
    assumptions: tuple[Record, ...]
    country: str
    priors: str
    notices: tuple[Notice, ...]
    image_request: ImageRequest | None = None
    image: ImagePrediction | None = None
    image_bounds: tuple[Bound, ...] = ()
    search: SearchResult | None = None
    compared: tuple["PlanResult", ...] = ()

    @property
    def name(self) -> str:
        return self.choice.name

    @property
    def num_gpus(self) -> int:
        return self.choice.layout.num_gpus

    @property
    def bits_per_parameter(self) -> float:
        return 8 * self.weights_bytes / self.num_parameters

    @property
    def output_tokens_per_s(self) -> Estimate | None:
        """Of all GPUs together."""
        each = self.output_tokens_per_s_per_gpu
        return None if each is None else each.scaled(self.num_gpus)

    @property
    def capacity_per_s(self) -> Estimate | None:
        """Output tokens of all GPUs together, at a rate."""
        return None if self.capacity_per_gpu is None else self.capacity_per_gpu.scaled(self.num_gpus)

    @property
    def is_overloaded(self) -> bool:
        """Whether the rate is more than can be served."""
        return self.utilization is not None and self.utilization >= 1

    @property
    def wall_watts(self) -> Estimate | None:
        """Of all GPUs, with their share of the servers."""
        return None if self.bill.power is None else self.bill.power.wall_watts

    @property
    def joules_per_output_token(self) -> Estimate | None:
        """At the wall."""
        return self.bill.joules_per_output_token

    @property
    def cost_per_million_tokens(self) -> Estimate | None:
        """In the currency of the assumptions."""
        return None if self.bill.cost is None else self.bill.cost.per_million_tokens

    @property
    def meets_targets(self) -> bool:
        return self.fits and all(target.is_reached for target in self.targets)

    def check_targets(self) -> None:
        """CheckFailed if a target that was asked for is not met, or not surely where that was asked for."""
        missed = [target for target in self.targets if not target.is_reached]
        if missed:
            limits = ", ".join(f"{target.name} {target.limit_ms:g} ms" for target in missed)
            how = " surely" if all(target.is_met for target in missed) else ""
            raise CheckFailed(
                f"not{how} met: {limits}", hint="leave --layout or --gpu out, and what meets it is searched"
            )

    @property
    def images_per_hour(self) -> Estimate | None:
        """Of all replicas, one image at a time each."""
        return None if self.image is None else self.image.image_s.inverse().scaled(3600 * self.choice.layout.replicas)

    def _image(self, request: ImageRequest) -> dict[str, Any]:
        image = self.image
        return {
            **_plain(request),
            "tokens": request.num_tokens,
            "flops_per_step": None if image is None else image.flops_per_step,
            "step_ms": None if image is None else _plain(image.step_s.scaled(1e3)),
            "image_s": None if image is None else _plain(image.image_s),
            "images_per_hour": _plain(self.images_per_hour),
            "bounds": [_plain(bound) for bound in self.image_bounds],
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data; each predicted figure as value, low and high."""
        choice, gpu, english = self.choice, self.choice.gpu, language("en")
        return {
            "model": self.model,
            "origin": self.origin,
            "num_parameters": self.num_parameters,
            "active_parameters": self.active_parameters,
            "gpu": gpu.key,
            "gpu_name": gpu.name,
            "gpus": self.num_gpus,
            "layout": choice.layout.name,
            "format": choice.format,
            "kv_cache": choice.cache,
            "engine": self.engine,
            "workload": _plain(self.workload),
            "fits": self.fits,
            "missing_bytes": self.missing_bytes,
            "nearest": [_choice(near) for near in self.nearest],
            "weights_bytes": self.weights_bytes,
            "weights_are_exact": self.weights_are_exact,
            "bits_per_parameter": self.bits_per_parameter,
            "weights": [_plain(row) for row in self.parts],
            "memory": {
                "gpu_bytes": self.memory.gpu_bytes,
                "usable_bytes": self.memory.usable_bytes,
                "parts": dict(self.memory.parts),
                "free_bytes": self.memory.free_bytes,
                "sequence_bytes": self.memory.sequence_bytes,
            },
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "kv_bytes_per_sequence": self.kv_bytes_per_sequence,
            "max_sequences": self.max_sequences,
            "sequences": self.sequences,
            "limit": self.limit,
            "waiting": self.waiting,
            "utilization": self.utilization,
            "capacity_tokens_per_s": _plain(self.capacity_per_s),
            "enough": None if self.enough is None else _choice(self.enough),
            "ttft_ms": _plain(self.ttft_ms),
            "itl_ms": _plain(self.itl_ms),
            "output_tokens_per_s_per_gpu": _plain(self.output_tokens_per_s_per_gpu),
            "output_tokens_per_s": _plain(self.output_tokens_per_s),
            "wall_watts": _plain(self.wall_watts),
            "joules_per_output_token": _plain(self.joules_per_output_token),
            "power": _plain(self.bill.power),
            "boundaries": dict(BOUNDARIES),
            "racks": _plain(self.bill.racks),
            "cost": None
            if self.bill.cost is None
            else {**_plain(self.bill.cost), "per_month": _plain(self.bill.cost.per_month)},
            "bound": self.bound,
            "bounds": {
                "decode": [_plain(bound) for bound in self.decode_bounds],
                "prefill": [_plain(bound) for bound in self.prefill_bounds],
            },
            "formats": [{**_plain(use), "bits": use.bits} for use in self.formats],
            "curve": [_plain(point) for point in self.curve],
            **({} if self.image_request is None else {"image": self._image(self.image_request)}),
            "targets": [_plain(target) for target in self.targets],
            "priors": self.priors,
            "country": self.country,
            "assumptions": [_plain(record) for record in self.assumptions],
            "notices": [english.said(notice.key, notice.values) for notice in self.notices],
            **({} if self.search is None else {"search": _search(self.search)}),
            **({} if not self.compared else {"compared": [other.to_dict() for other in self.compared]}),
        }


def _search(search: SearchResult) -> dict[str, Any]:
    return {
        "objective": search.objective,
        "tried": search.tried,
        "unranked": list(search.unranked),
        "found": [
            {**_choice(found.choice), **{name: _plain(getattr(found, name)) for name in _FOUND}}
            for found in search.found
        ],
    }


_FOUND = (
    *("batch", "itl_ms", "ttft_ms", "tokens_per_s", "cost_per_million_tokens", "joules_per_output_token"),
    *("is_sure", "is_best"),
)


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        "gpu": choice.gpu.key,
        "gpus": choice.layout.num_gpus,
        "layout": choice.layout.name,
        "format": choice.format,
        "kv_cache": choice.cache,
    }


def _plain(value: Any) -> Any:
    """Frozen dataclasses of plain fields as dicts, one level in another."""
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
