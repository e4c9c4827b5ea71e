"""How many pages the cache gets, and what to say when that is too few."""

import os
from pathlib import Path

import torch

from blockscale.engine.model import Model
from blockscale.engine.options import EngineOptions
from blockscale.engine.parallel import ParallelModel
from blockscale.engine.request import Request
from blockscale.engine.runner import Runner, last_rows
from blockscale.engine.sampler import Row, sample
from blockscale.engine.sampling import Sampling
from blockscale.engine.scheduler import Work
from blockscale.errors import EngineError

_CPU_BYTES = 4 << 30  # of a cache whose size nobody chose: main memory is others' as well
_CGROUP = "/sys/fs/cgroup"
_PROMPTS = 8  # sequences of the step by which memory is measured


def choose_num_pages(model: Model, options: EngineOptions) -> int:
    """`options.num_pages`, or as many as there is memory for and use.

    EngineError where a sequence of `options.max_context` tokens, or any of two pages, has no room.
    """
    if options.num_pages is not None:
        num_pages = options.num_pages
        room = num_pages * model.page_bytes(options.page_size)
    else:
        room = _room(model, options)
        num_pages = fitting_pages(room, model, options)
    wanted = options.max_context or min(model.context, 2 * options.page_size)
    if num_pages * options.page_size < min(wanted, model.context):
        raise EngineError(too_little(room, wanted, model, options), hint=_HINT)
    return num_pages


_HINT = "ask for a shorter max_context, store the cache in FP8 or NVFP4, raise memory_share, or free memory"


def fitting_pages(room: int, model: Model, options: EngineOptions) -> int:
    """Pages in `room` bytes, one set aside for the runner; not more than all requests that run at once can fill, twice
    over: the rest would be prefixes that few ask for again."""
    in_room = max(room // model.page_bytes(options.page_size) - 1, 0)
    context = min(options.max_context or model.context, model.context)
    return min(in_room, 2 * options.max_running * -(-context // options.page_size))


def too_little(room: int, wanted: int, model: Model, options: EngineOptions) -> str:
    page_bytes = model.page_bytes(options.page_size)
    needed = -(-wanted // options.page_size) * page_bytes
    fits = max(room // page_bytes, 0) * options.page_size
    return (
        f"the cache of one sequence of {wanted} tokens takes {gib(needed)}, "
        f"there is room for {gib(max(room, 0))}: {fits} tokens would fit"
    )


def free_bytes(device: torch.device) -> int:
    """Of the GPU's memory, or of main memory."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _available_bytes()


def _room(model: Model, options: EngineOptions) -> int:
    """Bytes that the cache may take: on a GPU what is left after weights and the largest step. Of several devices that
    with the least room has the say."""
    size = model.size if isinstance(model, ParallelModel) else 1
    if model.device.type != "cuda":
        return min(int(_available_bytes() * options.memory_share), _CPU_BYTES) // size
    torch.cuda.empty_cache()
    room = measured_room(model.device, options.memory_share, _step_bytes(model, options))
    return min(room, *model.rooms(options.memory_share)) if isinstance(model, ParallelModel) else room


def measured_room(device: torch.device, memory_share: float, step_bytes: int) -> int:
    """Bytes that a cache may take on this GPU beside a step of so many."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(free - total * (1 - memory_share)) - step_bytes


def _step_bytes(model: Model, options: EngineOptions) -> int:
    """Bytes that a step takes at its largest, besides cache and weights: measured, for nothing else knows it."""
    works = largest_step(model.context, options)
    num_pages = sum(len(work.request.pages) for work in works)
    torch.cuda.reset_peak_memory_stats(model.device)
    runner = Runner(model, num_pages, options.page_size, use_graphs=False)
    before = torch.cuda.memory_allocated(model.device)
    with torch.inference_mode():
        hidden = runner.run(works)
        rows = [last_rows(works)[-1]] * options.max_running
        logits = model.logits(hidden[torch.tensor(rows, device=hidden.device)])
        drawn = Sampling(temperature=1.0, top_p=0.9, presence_penalty=1.0)
        sample(logits, [Row(drawn, i) for i in range(options.max_running)])
    torch.cuda.synchronize(model.device)
    return torch.cuda.max_memory_allocated(model.device) - before


def largest_step(context: int, options: EngineOptions) -> list[Work]:
    """Prompts of `max_step_tokens` in all, of made-up requests that hold pages from 0 on."""
    num = min(max(-(-options.max_step_tokens // context), min(_PROMPTS, options.max_running)), options.max_step_tokens)
    works, page = [], 0
    for i in range(num):
        length = options.max_step_tokens // num + (i < options.max_step_tokens % num)
        request = Request(str(i), i, [0] * length, length, Sampling(), 0, length + 1, frozenset())
        num_pages = -(-length // options.page_size)
        request.add_pages(list(range(page, page + num_pages)))
        page += num_pages
        works.append(Work(request, 0, length))
    return works


def _available_bytes() -> int:
    """Of main memory, within what a container may use. Pages of files in memory go when they have to."""
    found = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = _figure("/proc/meminfo", "MemAvailable:", found // 1024) * 1024
    limit, used = _read(f"{_CGROUP}/memory.max").strip(), _read(f"{_CGROUP}/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        files = sum(_figure(f"{_CGROUP}/memory.stat", name, 0) for name in ("inactive_file", "active_file"))
        found = min(found, int(limit) - int(used) + files)
    return found


def _figure(path: str, name: str, default: int) -> int:
    """What follows `name` in a file of lines."""
    found = (line.split()[1] for line in _read(path).splitlines() if line.split()[:1] == [name])
    return int(next(found, default))


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def gib(num_bytes: int) -> str:
    """For messages."""
    return f"{num_bytes / 2**30:.2f} GiB"
