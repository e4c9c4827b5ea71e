import json
import math

import pytest
import torch

from blockscale.errors import ModelError, UsageError
from blockscale.evaluation import run
from blockscale.evaluation.result import Report
from blockscale.evaluation.run import evaluate_text
from blockscale.evaluation.windows import token_windows

V = 64


def encode(text: str) -> list[int]:
    return [ord(c) % V for c in text]


def sample_text(n: int) -> str:
    generator = torch.Generator().manual_seed(0)
    return "".join(chr(i) for i in torch.randint(V, (n,), generator=generator).tolist())


def bigram(seed: int, noise: float = 0.0, dtype: torch.dtype = torch.float32):
    """A model whose logits depend on the token before alone; `noise` moves them."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(V, V, generator=generator)
    table = (table + noise * torch.randn(V, V, generator=generator)).to(dtype)
    return lambda ids: table[ids]


def uniform(ids):
    return torch.zeros(*ids.shape, V)


def test_a_uniform_model_has_the_vocabulary_as_its_perplexity() -> None:
    found = evaluate_text("t", token_windows(sample_text(300), encode, window=32), uniform)
    assert found.perplexity.value == pytest.approx(V, rel=1e-6)
    assert (found.perplexity.low, found.perplexity.high) == pytest.approx((V, V), rel=1e-6)
    assert (found.num_windows, found.num_tokens) == (10, 290)
    assert found.reference_perplexity is None
    assert found.kl_mean is None


def test_a_model_compared_with_itself() -> None:
    found = evaluate_text("t", token_windows(sample_text(300), encode, window=32), bigram(0), bigram(0))
    assert found.perplexity == found.reference_perplexity
    assert found.perplexity_ratio.value == found.perplexity_ratio.low == found.perplexity_ratio.high == 1
    assert found.kl_mean.value == found.kl_mean.high == found.kl_p99 == 0
    assert found.top1_agreement.value == 1


def test_against_the_whole_text_at_once() -> None:
    """A bigram model does not care for windows: scored pairs in one piece give the same figures."""
    text = sample_text(500)
    candidate, reference = bigram(0, noise=0.4), bigram(0)
    found = evaluate_text("t", token_windows(text, encode, window=50, stride=20), candidate, reference, batch_size=3)
    ids = torch.tensor(encode(text))
    log_c = candidate(ids[:-1]).double().log_softmax(-1)
    log_r = reference(ids[:-1]).double().log_softmax(-1)
    rows = torch.arange(len(ids) - 1)
    kl = (log_r.exp() * (log_r - log_c)).sum(-1)
    nll, nll_reference = -log_c[rows, ids[1:]].mean(), -log_r[rows, ids[1:]].mean()
    assert found.num_tokens == 499
    assert found.perplexity.value == pytest.approx(math.exp(nll), rel=1e-6)
    assert found.reference_perplexity.value == pytest.approx(math.exp(nll_reference), rel=1e-6)
    assert found.perplexity_ratio.value == pytest.approx(math.exp(nll - nll_reference), rel=1e-6)
    assert found.kl_mean.value == pytest.approx(kl.mean().item(), rel=1e-5)
    assert found.kl_p99 == pytest.approx(torch.quantile(kl, 0.99).item(), rel=1e-5)
    assert found.top1_agreement.value == pytest.approx((log_c.argmax(-1) == log_r.argmax(-1)).double().mean().item())
    for interval in (found.perplexity, found.perplexity_ratio, found.kl_mean, found.top1_agreement):
        assert interval.low < interval.value < interval.high
    # pairing: the ratio is told far more closely than either perplexity
    width = found.perplexity.high / found.perplexity.low - 1
    assert found.perplexity_ratio.high / found.perplexity_ratio.low - 1 < width


@pytest.mark.parametrize("batch_size", [1, 2, 5, 100])
def test_batches_change_nothing(batch_size) -> None:
    cut = token_windows(sample_text(333), encode, window=32)
    batches = []

    def watched(ids):
        batches.append(ids.shape)
        return bigram(1)(ids)

    seen = []
    found = evaluate_text("t", cut, watched, bigram(2), batch_size, progress=lambda *at: seen.append(at))
    assert found == evaluate_text("t", cut, bigram(1), bigram(2))
    assert sum(shape[0] for shape in batches) == len(cut.windows)
    assert max(shape[0] for shape in batches) <= batch_size
    assert seen[-1] == (len(cut.windows), len(cut.windows))


def test_a_large_vocabulary_gets_smaller_batches(monkeypatch) -> None:
    monkeypatch.setattr(run, "LOGITS_BYTES", 2 * 32 * V * 4)
    batches = []

    def watched(ids):
        batches.append(ids.shape[0])
        return uniform(ids)

    evaluate_text("t", token_windows(sample_text(320), encode, window=32), watched, batch_size=8)
    assert batches == [1, 2, 2, 2, 2, 1]


def test_bf16_logits() -> None:
    cut = token_windows(sample_text(200), encode, window=32)
    found = evaluate_text("t", cut, bigram(0, dtype=torch.bfloat16), bigram(0))
    assert 0 < found.kl_mean.value < 1e-3


def test_a_broken_model_gives_nan_and_null() -> None:
    cut = token_windows(sample_text(200), encode, window=32)
    found = evaluate_text("t", cut, lambda ids: torch.full((*ids.shape, V), torch.nan), uniform)
    assert math.isnan(found.perplexity.value)
    report = Report("m", texts=(found,)).to_dict()
    assert json.loads(json.dumps(report, allow_nan=False))["perplexity"] is None


def test_logits_of_a_wrong_shape() -> None:
    cut = token_windows(sample_text(100), encode, window=32)
    with pytest.raises(ModelError, match="logits"):
        evaluate_text("t", cut, lambda ids: uniform(ids)[:, -1:])
    with pytest.raises(ModelError, match="its reference"):
        evaluate_text("t", cut, uniform, lambda ids: torch.zeros(*ids.shape, V + 1))


def test_batch_of_none() -> None:
    with pytest.raises(UsageError):
        evaluate_text("t", token_windows(sample_text(100), encode, window=32), uniform, batch_size=0)
