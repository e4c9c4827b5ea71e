"""The same bytes on a GPU as on the CPU. Needs a GPU."""

import pytest
import torch

from blockscale.formats.spec import FORMATS, NVFP4
from blockscale.formats.tensor import decode, encode
from blockscale.quantization.weight import quantize_tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def sample(dtype: torch.dtype, scale: float) -> torch.Tensor:
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(3)) * scale
    x[3] = 0
    return x.to(dtype)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scale", [1e-8, 0.02, 1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_format_has_the_same_bytes(name: str, scale: float, dtype: torch.dtype) -> None:
    x = sample(dtype, scale)
    here, there = encode(x, FORMATS[name]), encode(x.cuda(), FORMATS[name])
    assert torch.equal(here.packed.view(torch.uint8), there.packed.cpu().view(torch.uint8))
    assert torch.equal(here.block_scale.float(), there.block_scale.cpu().float())
    assert torch.equal(decode(here), decode(there).cpu())


def test_a_global_scale_given_on_the_cpu_is_divided_by_all_the_same() -> None:
    x, scale = sample(torch.bfloat16, 0.02), torch.tensor(3.1e-5)
    here, there = encode(x, NVFP4, global_scale=scale), encode(x.cuda(), NVFP4, global_scale=scale)
    assert torch.equal(here.packed, there.packed.cpu())


@pytest.mark.parametrize("method", ["sweep", "four_over_six"])
def test_searched_scales_are_as_good(method: str) -> None:
    """Sums are taken in another order, so nearly equal candidates may swap; the error may not."""
    x = sample(torch.bfloat16, 0.02)
    errors = [
        (quantize_tensor(t, scale=method).dequantize(torch.float32).cpu() - x.float()).square().sum()
        for t in (x, x.cuda())
    ]
    assert torch.allclose(errors[0], errors[1], rtol=1e-5)
