"""Parameter counts, caches and bytes against published totals."""

import pytest

from blockscale.errors import UsageError
from blockscale.planning.models.architecture import Part, from_config
from blockscale.planning.models.model import presets
from blockscale.planning.models.weights import Matrix, matrix_bytes, weights_of

LLAMA = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
}

# name, parameters (billions), multiplied with by each token (billions), KV elements a token
PUBLISHED = [
    ("llama-3.1-8b", 8.030, 7.505, 65_536),
    ("llama-3.1-70b", 70.554, 69.502, 163_840),
    ("llama-3.1-405b", 405.853, 403.748, 258_048),
    ("qwen3-235b-a22b", 235.094, 21.57, 96_256),
    ("gpt-oss-120b", 116.829, 5.131, 18_432),
    ("deepseek-r1", 671.026, 36.625, 35_136),
    ("mixtral-8x7b", 46.703, 12.749, 65_536),
    ("qwen3-30b-a3b", 30.532, 3.042, 49_152),
    ("llama-4-scout", 107.77, 16.138, 98_304),
    ("kimi-k2", 1026.408, 31.686, 35_136),
    ("minimax-m2.5", 228.689, 10.415, 126_976),
]


@pytest.mark.parametrize(("name", "total", "active", "cache"), PUBLISHED, ids=[p[0] for p in PUBLISHED])
def test_published_counts(name: str, total: float, active: float, cache: int) -> None:
    a = from_config(presets()[name], name)
    assert a.num_parameters / 1e9 == pytest.approx(total, abs=6e-4)
    assert a.active_parameters / 1e9 == pytest.approx(active, abs=3e-3)
    assert a.cache_elements_per_token() == cache


# Published totals in decimal GB: all linears in the format, unless a part is named.
BYTES = [
    ("llama-3.1-8b", "bf16", {}, 16.06),
    ("llama-3.1-8b", "fp8", {}, 9.08),
    ("llama-3.1-8b", "nvfp4", {}, 6.03),
    ("llama-3.1-70b", "fp8", {}, 72.66),
    ("llama-3.1-70b", "nvfp4", {}, 42.71),
    ("llama-3.1-405b", "bf16", {}, 811.71),
    ("llama-3.1-405b", "nvfp4", {}, 234.34),
    ("qwen3-235b-a22b", "nvfp4", {}, 134.1),
    ("qwen3-235b-a22b", "nvfp4", {Part.ATTENTION: "bf16"}, 143.7),
    ("gpt-oss-120b", "bf16", {Part.EXPERTS: "mxfp4"}, 65.25),
    ("gpt-oss-120b", "bf16", {Part.EXPERTS: "nvfp4"}, 68.83),
    ("deepseek-r1", "fp8-block128", {}, 673.2),
    ("deepseek-r1", "nvfp4", {Part.ATTENTION: "bf16"}, 396.7),
    ("deepseek-r1", "nvfp4", {Part.ATTENTION: "fp8"}, 385.3),
    ("deepseek-r1", "nvfp4", {}, 380.3),
    ("flux.1-dev", "bf16", {}, 23.80),
    ("flux.1-dev", "nvfp4", {}, 11.43),
    ("flux.1-dev", "nvfp4", {Part.MODULATION: "nvfp4"}, 6.76),
]


@pytest.mark.parametrize(("name", "fmt", "overrides", "gigabytes"), BYTES)
def test_published_bytes(name: str, fmt: str, overrides: dict[Part, str], gigabytes: float) -> None:
    weights = weights_of(from_config(presets()[name], name), fmt, overrides)
    assert weights.num_bytes / 1e9 == pytest.approx(gigabytes, rel=1e-3)


def test_bytes_of_a_matrix() -> None:
    odd = Matrix(Part.FEED_FORWARD, 3, 40)
    assert matrix_bytes(odd, "nvfp4") == 60 + 3 * 3 + 4
    assert matrix_bytes(odd, "mxfp4") == 60 + 3 * 2
    assert matrix_bytes(odd, "fp8-block128") == 120 + 4
    assert matrix_bytes(Matrix(Part.FEED_FORWARD, 3, 40, 5), "bf16") == 5 * 240
    with pytest.raises(UsageError, match="unknown format 'fp3'"):
        weights_of(from_config(LLAMA), "fp3")


def test_windows_bound_the_cache() -> None:
    a = from_config(presets()["gpt-oss-120b"])
    per_layer = 2 * 8 * 64
    assert a.cache_elements(100) == 36 * per_layer * 100
    assert a.cache_elements(10_000) == 18 * per_layer * 10_000 + 18 * per_layer * 128


def test_a_latent_cache_is_small() -> None:
    assert from_config(presets()["deepseek-r1"]).cache_elements_per_token() == 61 * 576


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_missing_field_is_named(field: str) -> None:
    config = {key: value for key, value in LLAMA.items() if key != field}
    with pytest.raises(UsageError, match=field) as caught:
        from_config(config)
    assert caught.value.hint


@pytest.mark.parametrize("value", ["many", 2.5, -3, 0])
def test_a_field_of_the_wrong_kind_is_named(value: object) -> None:
    with pytest.raises(UsageError, match="hidden_size"):
        from_config({**LLAMA, "hidden_size": value})
