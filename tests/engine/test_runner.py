"""Batches: every token where it belongs; and how steps are padded for CUDA graphs."""

import pytest
import torch

from blockscale.engine.executor import Executor
from blockscale.engine.graphs import DecodeGraphs, graph_size, graph_width, padded
from blockscale.engine.memory import fitting_pages, largest_step, too_little
from blockscale.engine.options import EngineOptions
from blockscale.engine.request import Request
from blockscale.engine.runner import Runner, last_rows, make_batch
from blockscale.engine.sampling import Sampling
from blockscale.engine.scheduler import Work
from engine.fake_decoder import FakeModel, running_hashes

CPU = torch.device("cpu")
SIZE = 16


def request(tokens: list[int], pages: list[int]) -> Request:
    made = Request("r", 0, tokens, len(tokens), Sampling(), 0, 1000, frozenset())
    made.add_pages(pages)
    return made


def test_a_batch_of_pieces_decodes_and_drafts() -> None:
    piece = request(list(range(40)), [7, 2, 9])
    decode = request([50, 51, 52], [4])
    works = [Work(piece, 15, 19), Work(decode, 2, 3, draft=(60, 61))]
    batch = make_batch(works, SIZE)
    assert batch.token_ids.tolist() == [15, 16, 17, 18, 52, 60, 61]
    assert batch.positions.tolist() == [15, 16, 17, 18, 2, 3, 4]
    assert batch.cu_seqlens.tolist() == [0, 4, 7]
    assert batch.lengths.tolist() == [19, 5]
    assert batch.page_table[0].tolist() == [7, 2]
    assert batch.page_table[1, 0] == 4
    assert batch.slots.tolist() == [7 * 16 + 15, 2 * 16, 2 * 16 + 1, 2 * 16 + 2, 66, 67, 68]
    assert (batch.max_query, batch.is_decode) == (4, False)
    dtypes = [batch.token_ids.dtype, batch.positions.dtype, batch.slots.dtype]
    assert dtypes == [torch.int64] * 3
    assert [batch.cu_seqlens.dtype, batch.lengths.dtype, batch.page_table.dtype] == [torch.int32] * 3
    assert last_rows(works) == [4, 5, 6], "the piece is not the end of its prompt"
    assert make_batch([Work(decode, 2, 3)], SIZE).is_decode


def test_pages_of_a_request_that_grows_and_starts_anew() -> None:
    one = request([1], [])
    for page in range(30):
        one.add_pages([page])
    assert one.page_row()[:30].tolist() == list(range(30))
    assert one.take_pages() == list(range(30))
    one.add_pages([5, 3])
    assert (one.pages, one.page_row()[:2].tolist()) == ([5, 3], [5, 3])


def test_graphs_have_few_sizes_and_little_for_nothing() -> None:
    sizes = sorted({graph_size(num) for num in range(1, 513)})
    assert sizes[:6] == [1, 2, 4, 8, 16, 24]
    assert len(sizes) < 45
    for num in range(1, 513):
        assert num <= graph_size(num) <= max(num + 7, num * 1.25)
    assert [graph_width(n) for n in (1, 64, 65, 300, 1025)] == [64, 64, 256, 1024, 4096]


@pytest.mark.parametrize("num", [1, 3, 5])
def test_a_padded_batch_gives_the_same_and_writes_on_nobodys_page(num: int) -> None:
    model = FakeModel()
    caches = model.allocate(9, SIZE)
    requests = [request(list(range(i, i + 17 + i)), [i, num + i]) if i < 4 else request([3], [8]) for i in range(num)]
    works = [Work(r, 0, len(r.tokens) - 1) for r in requests if len(r.tokens) > 1]
    if works:
        model.forward(make_batch(works, SIZE), caches)
    batch = make_batch([Work(r, len(r.tokens) - 1, len(r.tokens)) for r in requests], SIZE)
    before = caches[0].clone()
    whole = padded(batch, graph_size(num), 64, page=8, page_size=SIZE)
    assert whole.page_table.shape == (graph_size(num), 64)
    assert whole.cu_seqlens.tolist() == list(range(graph_size(num) + 1))
    assert whole.page_table.dtype == batch.page_table.dtype
    if graph_size(num) - num <= 1:  # more rows than one write the same place, which this model minds
        found = model.forward(whole, caches)[:num]
        assert found[:, 0].tolist() == [running_hashes(r.tokens)[-1] for r in requests]
        changed = (caches[0] != before).nonzero()[:, 0].unique().tolist()
        assert set(changed) <= {8, *(r.pages[(len(r.tokens) - 1) // SIZE] for r in requests)}
    assert whole.slots[num:].unique().tolist() in ([], [8 * SIZE])


def test_a_model_that_cannot_be_captured_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Executor(FakeModel(), 2, SIZE, use_graphs=True)
    graphs = DecodeGraphs(executor._forward, page=2, page_size=SIZE, device=torch.device("cpu"))
    executor.graphs = graphs

    def refuse(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graphs, "_capture", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    one = request([3], [0])
    for _ in range(2):
        assert executor.run(make_batch([Work(one, 0, 1)], SIZE))[0, 0] == running_hashes([3])[0]
        assert executor.run(make_batch([Work(one, 0, 1)], SIZE), torch.tensor([9]))[0, 0] == running_hashes([9])[0]
    assert graphs.why_without == "operation not permitted when stream is capturing"
    assert graphs.sizes == []


def test_the_runner_has_a_page_more_than_requests_can_have() -> None:
    runner = Runner(FakeModel(), 5, SIZE)
    assert runner.caches[0].shape == (6, SIZE)
    assert runner.graphs is None


@pytest.mark.parametrize(("context", "max_step_tokens"), [(4096, 2048), (100, 2048), (10**6, 70)])
def test_the_step_by_which_memory_is_measured_is_the_largest(context: int, max_step_tokens: int) -> None:
    options = EngineOptions(max_step_tokens=max_step_tokens, max_running=64)
    works = largest_step(context, options)
    assert sum(work.num_tokens for work in works) == max_step_tokens
    assert max(work.end for work in works) <= context
    pages = [page for work in works for page in work.request.pages]
    assert pages == list(range(len(pages)))
    hidden = Runner(FakeModel(context), len(pages), 16).run(works)
    assert hidden.shape[0] == max_step_tokens


def test_how_many_pages_fit() -> None:
    model = FakeModel(context=1000)  # 128 bytes a page
    options = EngineOptions(max_running=2)
    assert fitting_pages(128 * 11 + 5, model, options) == 10
    assert fitting_pages(50, model, options) == fitting_pages(-10, model, options) == 0
    assert fitting_pages(10**9, model, options) == 2 * 2 * 63
    assert too_little(128 * 3, 1000, model, options).endswith("48 tokens would fit")
