"""What can be chosen about an engine, and its defaults."""

from dataclasses import dataclass

from blockscale.errors import UsageError


@dataclass(frozen=True)
class EngineOptions:
    """Fields that are None are chosen by the machine.

    page_size        tokens of a page: a power of two, 16 or more
    num_pages        of the cache; None: as many as `memory_share` has room for
    memory_share     of the GPU's memory, or of the main memory that is available, that may be in use
    max_context      tokens of a sequence at most; None: the model's own, or what the cache holds
    max_running      requests that are computed at once
    max_step_tokens  tokens of one step; a longer prompt is computed in pieces
    max_waiting      requests in the queue; None: any number
    use_graphs       decode through CUDA graphs, on a GPU
    run_ahead        decode steps are launched before the last one's tokens are read, see `flight`; None: on a GPU
    num_draft        tokens proposed a step from the request's own text; 0: no speculation
    seed             of requests that have none; None: another one every time
    tensor_parallel  devices of this host that the model is divided among when it is loaded
    """

    page_size: int = 16
    num_pages: int | None = None
    memory_share: float = 0.9
    max_context: int | None = None
    max_running: int = 64
    max_step_tokens: int = 2048
    max_waiting: int | None = None
    use_prefix_cache: bool = True
    use_graphs: bool = True
    run_ahead: bool | None = None
    num_draft: int = 0
    seed: int | None = None
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        for field, is_good, rule in (
            ("page_size", self.page_size >= 16 and self.page_size & (self.page_size - 1) == 0, "16, 32, 64, ..."),
            ("num_pages", self.num_pages is None or self.num_pages >= 1, "1 or more"),
            ("memory_share", 0 < self.memory_share <= 1, "above 0, up to 1"),
            ("max_context", self.max_context is None or self.max_context >= 2, "2 or more: a token and the next"),
            ("max_running", self.max_running >= 1, "1 or more"),
            ("max_step_tokens", self.max_step_tokens >= self.max_running, "not less than max_running"),
            ("max_waiting", self.max_waiting is None or self.max_waiting >= 0, "0 or more"),
            ("num_draft", self.num_draft >= 0, "0 (none) or more"),
            ("tensor_parallel", self.tensor_parallel >= 1, "1 or more"),
        ):
            if not is_good:
                raise UsageError(f"{field} cannot be {getattr(self, field)}", hint=f"{field}: {rule}")
