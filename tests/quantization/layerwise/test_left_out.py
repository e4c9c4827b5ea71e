"""Windows on which the 16-bit model, or only the quantized one, gives NaN or Inf: they leave both streams."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockscale.errors import ModelError, NonFiniteError
from blockscale.host.linear import PackedLinear
from blockscale.quantization.hidden_states import HiddenStates

from ..test_left_out import BAD, change_embedding
from ..test_pipeline import all_files
from ..test_walk import small_model
from .running import SIDE_FILE, is_equal, quantize, stored_linears

FIRST_LAYER = ["*.layers.0.*"]  # kept: it sees windows that later ones do not


def overflowing(folder: Path) -> Path:
    """A model whose second and last layer cannot stand the token BAD: its bias takes that one's first channel, and no
    other's, out of fp32's range."""
    small_model(folder, "llama", mlp_bias=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 0] = 0
    tensors["model.embed_tokens.weight"][BAD, 0] = 3e38
    tensors["model.layers.1.mlp.down_proj.bias"][0] = 2e38
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def sound(folder: Path) -> Path:
    """The same, but it can: BAD alone has a first channel, about ten times as large as any other."""
    tensors = load_file(overflowing(folder) / "model.safetensors")
    tensors["model.embed_tokens.weight"][BAD, 0] = 1
    tensors["model.layers.1.mlp.down_proj.bias"][0] = 0
    for layer in range(2):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.{layer}.{name}.weight"][0] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def ids(*bad: int, count: int = 20, length: int = 16) -> Tensor:
    """Three batches; the windows `bad` have the token once."""
    drawn = torch.randint(BAD + 1, 128, (count, length), generator=torch.Generator().manual_seed(4))
    drawn[list(bad), 7] = BAD
    return drawn


def without(given: Tensor, *bad: int) -> Tensor:
    return given[[i for i in range(len(given)) if i not in bad]]


def weights_of(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in all_files(folder).items() if name != SIDE_FILE}


def test_a_batch_that_the_16_bit_model_cannot_run(tmp_path: Path) -> None:
    """It is as if its windows had not been given."""
    path, bad = overflowing(tmp_path / "m"), (16, 17, 18, 19)
    found = quantize(path, tmp_path / "a", ids=ids(*bad), keep=FIRST_LAYER)
    (notice,) = found.notices
    assert notice.startswith(
        "4 of 20 calibration windows are left out from where they gave NaN or Inf: first, the "
        "output of decoder layer 1 holds NaN or Inf"
    )
    quantize(path, tmp_path / "b", ids=without(ids(*bad), *bad), keep=FIRST_LAYER)
    assert weights_of(tmp_path / "a") == weights_of(tmp_path / "b")


@pytest.mark.parametrize("bad", [(2,), (0, 7, 15), (1, 16, 17, 18, 19), tuple(range(8, 16))])
def test_some_windows_of_a_batch(bad: tuple[int, ...], tmp_path: Path) -> None:
    """The sums are over the same tokens in another order, so that choices may tip over, but no input's range."""
    path = overflowing(tmp_path / "m")
    found = quantize(path, tmp_path / "a", "nvfp4-gptq", ids(*bad), keep=FIRST_LAYER, kv_cache="fp8")
    assert [n.partition(" calibration")[0] for n in found.notices] == [f"{len(bad)} of 20"]
    whole = quantize(path, tmp_path / "b", "nvfp4-gptq", without(ids(*bad), *bad), keep=FIRST_LAYER)
    first = [name for name in found.layers if ".layers.1.self_attn.q_proj" in name]
    for name in first:
        assert found.layers[name].input_amax == pytest.approx(whole.layers[name].input_amax, rel=1e-5)
    for linear in stored_linears(tmp_path / "a").values():
        assert torch.isfinite(linear.weight.dequantize(torch.float32)).all()
        assert torch.isfinite(linear.input_global_scale)


def test_more_than_half(tmp_path: Path) -> None:
    path = overflowing(tmp_path / "m")
    quantize(path, tmp_path / "a", "nvfp4-gptq", ids(*range(10)))
    with pytest.raises(ModelError, match="the output of decoder layer 1 holds NaN or Inf on the calibration text"):
        quantize(path, tmp_path / "b", "nvfp4-gptq", ids(*range(9, 20)))
    assert not (tmp_path / "b").exists()
    assert not list(tmp_path.glob(".b*")), "and nothing is left of it"


def test_the_window_that_layers_are_probed_with(tmp_path: Path) -> None:
    """The first, unless its embedding is not finite."""
    path = small_model(tmp_path / "m", "gemma3_text", head_dim=16)  # multiplies its embedding by 8
    change_embedding(path, 3e38)
    found = quantize(path, tmp_path / "a", "nvfp4-awq", ids(0, 3))
    (notice,) = found.notices
    assert notice.startswith("2 of 20")
    assert "the embedding" in notice


def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed keys and values are NaN for the token BAD, which alone has a first channel. 16-bit ones are not."""
    forward = PackedLinear.forward

    def spoiled(self: PackedLinear, x: Tensor, expert: int | None = None) -> Tensor:
        y = forward(self, x, expert)
        return torch.where((x[..., :1] != 0) & (self.out_features == 32), torch.nan, y)

    monkeypatch.setattr(PackedLinear, "forward", spoiled)


def test_a_batch_that_only_the_quantized_model_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows when the next site is to be quantized; the layer is begun again."""
    path, bad = sound(tmp_path / "m"), (16, 17, 18, 19)
    spoil(monkeypatch)
    found = quantize(path, tmp_path / "a", ids=ids(*bad), keep=FIRST_LAYER)
    (notice,) = found.notices
    assert notice.startswith("4 of 20")
    assert "the input of model.layers.1.self_attn.o_proj holds NaN" in notice
    quantize(path, tmp_path / "b", ids=without(ids(*bad), *bad), keep=FIRST_LAYER)
    assert weights_of(tmp_path / "a") == weights_of(tmp_path / "b")


def test_more_than_half_of_the_quantized_models_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sound(tmp_path / "m")
    spoil(monkeypatch)
    with pytest.raises(ModelError, match="o_proj holds NaN or Inf on the calibration text"):
        quantize(path, tmp_path / "a", "nvfp4-gptq", ids(*range(11)), keep=FIRST_LAYER)


def test_what_no_window_explains_is_no_windows_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is not in the inputs is raised as it is, not tried again for ever."""
    from blockscale.quantization.layerwise import layer

    def fail(job: object) -> None:
        raise NonFiniteError("model.layers.0.self_attn.q_proj: NaN or Inf in the Hessian")

    monkeypatch.setattr(layer, "quantize_site", fail)
    with pytest.raises(NonFiniteError, match="in the Hessian"):
        quantize(overflowing(tmp_path / "m"), tmp_path / "a", "nvfp4-gptq", ids())


def test_a_view_changes_nothing_on_disk(tmp_path: Path) -> None:
    states = HiddenStates(tmp_path, "hidden")
    written = [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    for batch, numbers in enumerate(written):
        states.write(3, batch, torch.tensor(numbers).view(-1, 1, 1).expand(-1, 2, 5).float())
    before = all_files(tmp_path)
    once = [(0, 2, 3), (5,), (8, 9)]
    view = states.leaving_out(3, written, once)
    twice = view.leaving_out(3, once, [(0, 3), (9,)])
    assert [view.read(3, i)[:, 0, 0].tolist() for i in range(3)] == [[0, 2, 3], [5], [8, 9]]
    assert [twice.read(3, i)[:, 0, 0].tolist() for i in range(2)] == [[0, 3], [9]]
    assert all_files(tmp_path) == before
    twice.write(4, 0, torch.zeros(2, 2, 5))
    assert states.read(4, 0).shape == view.read(4, 0).shape == (2, 2, 5), "another generation is what it is"


def test_equal_is_to_the_byte(tmp_path: Path) -> None:
    """What the other tests compare with can tell two checkpoints apart."""
    path = overflowing(tmp_path / "m")
    quantize(path, tmp_path / "a", "nvfp4-gptq", ids())
    quantize(path, tmp_path / "b", "nvfp4-gptq", ids(count=19))
    a, b = stored_linears(tmp_path / "a"), stored_linears(tmp_path / "b")
    assert all(is_equal(a[name], a[name]) for name in a)
    assert not all(is_equal(a[name], b[name]) for name in a)
