"""How a model is spread over GPUs."""

import re
from dataclasses import dataclass

from blockscale.errors import UsageError
from blockscale.planning.models.architecture import Architecture


@dataclass(frozen=True)
class Layout:
    """One replica: `tensor` x `pipeline` x `attention_data` GPUs, and how often it is there.

    tensor          every matrix is cut among so many GPUs
    pipeline        layers are cut into so many stages
    attention_data  attention is copied so many times, each with its own requests; experts are spread over all of them
    is_expert       experts are whole on a GPU each, instead of being cut like the other matrices
    replicas        independent copies of all this
    """

    tensor: int = 1
    pipeline: int = 1
    attention_data: int = 1
    is_expert: bool = False
    replicas: int = 1

    @property
    def gpus_per_replica(self) -> int:
        return self.tensor * self.pipeline * self.attention_data

    @property
    def num_gpus(self) -> int:
        return self.gpus_per_replica * self.replicas

    @property
    def name(self) -> str:
        if self.attention_data > 1:
            parts = f"dep{self.attention_data}" if self.is_expert else f"adp{self.attention_data}"
            parts += f"tp{self.tensor}" if self.tensor > 1 else ""
        else:
            parts = ("tep" if self.is_expert else "tp") + str(self.tensor)
        parts += f"pp{self.pipeline}" if self.pipeline > 1 else ""
        return parts + (f"dp{self.replicas}" if self.replicas > 1 else "")


_PIECE = re.compile(r"(dep|tep|adp|tp|pp|dp|ep)(\d+)")


def parse_layout(text: str) -> Layout:
    """`tp8`, `tp4pp2`, `tep8` (attention cut, experts whole), `dep8` (attention copied, experts spread), `tp2dp4`."""
    wanted = text.lower().replace("-", "").replace("x", "").replace("_", "")
    pieces = _PIECE.findall(wanted)
    if not pieces or "".join(kind + size for kind, size in pieces) != wanted or any(int(n) < 1 for _, n in pieces):
        raise UsageError(f"layout '{text}' is not known", hint="tp8, tp4pp2, tep8, dep8, tp2dp4 ...")
    sizes: dict[str, int] = {}
    for kind, size in pieces:
        if kind in sizes:
            raise UsageError(f"layout '{text}' names {kind} twice", hint="tp8, tp4pp2, tep8, dep8, tp2dp4 ...")
        sizes[kind] = int(size)
    if sum(kind in sizes for kind in ("dep", "tep", "adp")) > 1 or ("tep" in sizes and "tp" in sizes):
        raise UsageError(f"layout '{text}' spreads attention in two ways", hint="one of tp, tep, dep")
    return Layout(
        tensor=sizes.get("tp", sizes.get("tep", 1)),
        pipeline=sizes.get("pp", 1),
        attention_data=sizes.get("dep", sizes.get("adp", 1)),
        is_expert="dep" in sizes or "tep" in sizes or sizes.get("ep", 1) > 1,
        replicas=sizes.get("dp", 1),
    )


def check_layout(layout: Layout, architecture: Architecture) -> None:
    """UsageError for a layout that no engine can build for this model."""
    for block in architecture.blocks:
        heads = block.attention.num_heads
        if heads % layout.tensor:
            divisors = [n for n in (1, 2, 4, 8, 16, 32, 64) if heads % n == 0]
            raise UsageError(
                f"tensor parallel {layout.tensor} does not divide {heads} attention heads",
                hint="use " + ", ".join(f"tp{n}" for n in divisors),
            )
        spread = layout.tensor * layout.attention_data
        if block.is_moe and layout.is_expert and block.num_experts % spread:
            raise UsageError(
                f"{block.num_experts} experts cannot be spread evenly over {spread} GPUs", hint="choose a divisor"
            )
    if layout.is_expert and not any(block.is_moe for block in architecture.blocks):
        raise UsageError("expert parallel, but the model has no experts", hint="use tp")
    if layout.pipeline > architecture.num_layers:
        raise UsageError(f"{layout.pipeline} pipeline stages for {architecture.num_layers} layers", hint="use fewer")
