"""What a budget may be. Needs nothing."""

from typing import Any

import pytest

from blockscale.errors import UsageError
from blockscale.quantization.search.budget import Budget, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("20GB", 20 * 10**9), ("1.5 GiB", 3 * 2**29), ("800m", 8 * 10**8), ("12345", 12345), ("7b", 7), ("2 kB", 2000)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "20XB", "5 i", "1,5GB", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="no size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, "here are none"),
        ({"bits": 5.0, "max_kl": 0.1}, "--bits, --max-kl"),
        ({"bits": 0.0}, "positive"),
        ({"bits": float("nan")}, "positive"),
        ({"num_bytes": -1}, "positive"),
        ({"max_kl": float("inf")}, "positive"),
        ({"itl_ms": 5.0}, "needs to know the GPU"),
        ({"bits": 5.0, "gpu": "h200"}, "does not depend on a GPU"),
        ({"max_kl": 1.0, "concurrency": 2}, "does not depend on a GPU"),
        ({"bits": 5.0, "context": 1024}, "the KV cache"),
        ({"num_bytes": 5, "context": 1}, "--context 1 is too small"),
        ({"joules": 5.0, "gpu": "h200", "gpus": 0}, "--gpus 0"),
    ],
)
def test_what_is_no_budget(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Budget(**limits)
    assert caught.value.hint
