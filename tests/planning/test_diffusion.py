"""Time of an image against published FLOPs, and how it moves with what it depends on."""

import pytest

from blockscale.errors import UsageError
from blockscale.planning.hardware.catalogue import find_gpu
from blockscale.planning.models.architecture import from_config
from blockscale.planning.models.model import presets
from blockscale.planning.planner import plan
from blockscale.planning.speed.diffusion import ImageRequest, attention_flops, linear_flops, parse_resolution

FLUX = from_config(presets()["flux.1-dev"], "flux.1-dev")


def test_flops_of_a_step() -> None:
    """4096 tokens of the image and 512 of the text: 59.5 TFLOP in the linears and 14.9 in attention."""
    tokens = ImageRequest().num_tokens
    assert tokens == 4608
    assert linear_flops(FLUX, tokens) == pytest.approx(59.5e12, rel=2e-3)
    assert attention_flops(FLUX, tokens) == pytest.approx(14.9e12, rel=2e-3)


def test_a_token_meets_one_stream() -> None:
    """57 blocks of 12 H^2, not all 11.9 billion parameters."""
    assert FLUX.active_parameters == pytest.approx(57 * 12 * 3072**2, rel=1e-6)
    assert FLUX.num_parameters == pytest.approx(11.901e9, rel=1e-3)


def test_an_image_takes_its_steps() -> None:
    result = plan("flux.1-dev", gpu="h100")
    assert result.image is not None
    assert result.image.flops_per_step == pytest.approx(74.4e12, rel=1e-3)
    ideal_s = 74.4e12 / find_gpu("h100").peak("bf16").value
    assert ideal_s < result.image.step_s.value < 2 * ideal_s
    assert result.image.image_s.value == pytest.approx(28 * result.image.step_s.value)
    assert result.image.image_s.low < result.image.image_s.value < result.image.image_s.high
    assert result.image_bounds[0].name == "compute"
    data = result.to_dict()["image"]
    assert data["step_ms"]["value"] == pytest.approx(1e3 * result.image.step_s.value)
    assert data["tokens"] == 4608
    four = plan("flux.1-dev", gpu="h100", steps=4).image
    assert four is not None
    assert four.image_s.value == pytest.approx(result.image.image_s.value / 7)


def test_it_grows_with_the_square_of_the_side_and_faster() -> None:
    small, large = (plan("flux.1-dev", gpu="b200", resolution=size).image for size in ("512", "2048x2048"))
    assert small is not None
    assert large is not None
    assert large.flops_per_step > 11 * small.flops_per_step  # 16896 tokens against 1536
    assert large.step_s.value > 8 * small.step_s.value


def test_fewer_bits_and_more_gpus_make_it_quicker() -> None:
    def step_s(**options: str) -> float:
        image = plan("flux.1-dev", gpu="b200", **options).image  # type: ignore[arg-type]
        assert image is not None
        return image.step_s.value

    assert step_s(format="nvfp4") < step_s(format="fp8") < step_s()
    assert step_s(layout="tp2") < step_s()
    copies = plan("flux.1-dev", gpu="b200", gpus=5).images_per_hour
    alone = plan("flux.1-dev", gpu="b200").images_per_hour
    assert copies is not None
    assert alone is not None
    assert copies.value == pytest.approx(5 * alone.value)


def test_what_does_not_fit_has_no_time() -> None:
    result = plan("flux.1-dev", gpu="rtx-4090")
    assert not result.fits
    assert result.image is None
    assert result.to_dict()["image"]["image_s"] is None


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"steps": 0}, "--steps 0"),
        ({"resolution": "1000"}, "--resolution 1000x1000"),
        ({"resolution": "wide"}, "--resolution wide"),
        ({"resolution": "0x16"}, "--resolution 0x16"),
    ],
)
def test_what_is_no_image(options: dict[str, object], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        plan("flux.1-dev", gpu="b200", **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not images"):
        plan("llama-3.1-8b", gpu="b200", **options)  # type: ignore[arg-type]


def test_resolutions() -> None:
    assert parse_resolution("1024") == (1024, 1024)
    assert parse_resolution("1024X768") == (1024, 768)
