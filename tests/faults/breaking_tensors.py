"""Ways to break the tensors of a checkpoint. Each returns a function that does it to a folder."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from .raw import E2M1, Tensors, decode, edit, modules_of, pack, unpack, weight_of

Break = Callable[[Path], None]
E4M3_MAX, E4M3_STEP = 448.0, 2.0**-9  # the step of its subnormal numbers, which end below 2^-6
EVEN_FIRST = torch.tensor([*range(0, 16, 2), *range(1, 16, 2)])  # of two codes as near, the even one
_GLOBAL = ("weight_scale_2", "weight_global_scale")


def on_tensors(change: Callable[[Tensors], None]) -> Break:
    return lambda folder: edit(folder, change)


def drop(*names: str) -> Break:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return on_tensors(change)


def drop_below(*prefixes: str) -> Break:
    """Every tensor of these modules."""

    def change(tensors: Tensors) -> None:
        lost = [name for name in tensors if name.startswith(tuple(f"{prefix}." for prefix in prefixes))]
        assert lost
        for name in lost:
            del tensors[name]

    return on_tensors(change)


def drop_ending(*endings: str) -> Break:
    def change(tensors: Tensors) -> None:
        lost = [name for name in tensors if name.endswith(endings)]
        assert lost
        for name in lost:
            del tensors[name]

    return on_tensors(change)


def put(name: str, value: Tensor) -> Break:
    return on_tensors(lambda tensors: tensors.update({name: value}))


def rename(old: str, new: str) -> Break:
    return on_tensors(lambda tensors: tensors.update({new: tensors.pop(old)}))


def under_another_name(folder: Path) -> None:
    """Every tensor below `language_model`, which is what lists are made for here."""

    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)

    edit(folder, change)


def fill(name: str, value: float) -> Break:
    """Keeps dtype and shape."""
    return on_tensors(lambda tensors: tensors.update({name: torch.full_like(tensors[name], value)}))


def byte(name: str, value: int, position: int = 5) -> Break:
    return on_tensors(lambda tensors: tensors[name].view(torch.uint8).view(-1)[position].fill_(value))


def set_bit(name: str, bit: int, position: int = 5) -> Break:
    return on_tensors(lambda tensors: tensors[name].view(torch.uint8).view(-1)[position].bitwise_or_(bit))


def reshape(name: str, *shape: int) -> Break:
    return on_tensors(lambda tensors: tensors.update({name: tensors[name].reshape(shape)}))


def copy(old: str, new: str) -> Break:
    return on_tensors(lambda tensors: tensors.update({new: tensors[old].clone()}))


def cast(name: str, dtype: torch.dtype) -> Break:
    return on_tensors(lambda tensors: tensors.update({name: tensors[name].to(dtype)}))


def multiply(name: str, factor: float) -> Break:
    return on_tensors(lambda tensors: tensors[name].mul_(factor))


# ---------------------------------------------------------------- scales


def global_name(tensors: Tensors, module: str) -> str:
    return next(f"{module}.{suffix}" for suffix in _GLOBAL if f"{module}.{suffix}" in tensors)


def move_scale(module: str, ratio: float) -> Break:
    """A global scale `ratio` times as large over block scales that much smaller: exact where E4M3 can say so."""

    def change(tensors: Tensors) -> None:
        name = global_name(tensors, module)
        is_divisor = name.endswith("weight_global_scale")
        tensors[name] = tensors[name] / ratio if is_divisor else tensors[name] * ratio
        scale = tensors[f"{module}.weight_scale"].float() / ratio
        tensors[f"{module}.weight_scale"] = scale.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)

    return on_tensors(change)


def reciprocal(*names: str) -> Break:
    """The other direction of a second-level scale."""

    def change(tensors: Tensors) -> None:
        for name in names:
            tensors[name] = tensors[name].reciprocal()

    return on_tensors(change)


def reciprocal_everywhere(suffix: str) -> Break:
    def change(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith(f".{suffix}"):
                tensors[name] = tensors[name].reciprocal()

    return on_tensors(change)


def one_level(module: str) -> Break:
    """A global scale of 1: block scales carry all of the magnitude and land among E4M3's subnormal numbers."""

    def change(tensors: Tensors) -> None:
        name = global_name(tensors, module)
        scale = tensors[name].float().reshape(())
        scale = 1 / scale if name.endswith("weight_global_scale") else scale
        block = (tensors[f"{module}.weight_scale"].float() * scale).clamp(min=E4M3_STEP)
        assert (block < 2**-6).float().mean() > 0.5
        tensors[f"{module}.weight_scale"] = block.to(torch.float8_e4m3fn)
        tensors[name] = torch.ones_like(tensors[name])

    return on_tensors(change)


def zero_scales(module: str, kept_rows: int = 0) -> Break:
    """Block scales that were never written, over codes that were."""

    def change(tensors: Tensors) -> None:
        assert weight_of(tensors, module).any()
        tensors[f"{module}.weight_scale"].view(torch.uint8)[kept_rows:] = 0

    return on_tensors(change)


def zero_as_nan(module: str) -> Break:
    """How Model Optimizer writes a weight of zeros: 0 / 0 at every level."""

    def change(tensors: Tensors) -> None:
        weight_of(tensors, module).fill_(0x77)
        tensors[f"{module}.weight_scale"].view(torch.uint8).fill_(0xFF)
        tensors[global_name(tensors, module)].fill_(0)

    return on_tensors(change)


# ---------------------------------------------------------------- layout


def zeros_throughout(module: str) -> Break:
    """A weight of zeros with zeros at every level."""

    def change(tensors: Tensors) -> None:
        for tensor in (weight_of(tensors, module), tensors[f"{module}.weight_scale"].view(torch.uint8)):
            tensor.zero_()
        tensors[global_name(tensors, module)].fill_(0)

    return on_tensors(change)


def svd_part(module: str, rank: int = 4) -> Break:
    """What Model Optimizer leaves of SVDQuant's low-rank part."""

    def change(tensors: Tensors) -> None:
        n, half = weight_of(tensors, module).shape
        tensors[f"{module}.weight_quantizer._svdquant_lora_a"] = torch.ones(rank, 2 * half, dtype=torch.bfloat16)
        tensors[f"{module}.weight_quantizer._svdquant_lora_b"] = torch.ones(n, rank, dtype=torch.bfloat16)

    return on_tensors(change)


def swap_nibbles(*modules: str) -> Break:
    def change(tensors: Tensors) -> None:
        for module in modules or modules_of(tensors):
            packed = weight_of(tensors, module)
            packed.copy_((packed << 4) | (packed >> 4))

    return on_tensors(change)


def swizzle_scales(*modules: str) -> Break:
    """Block scales in the order of the tensor core, in place of rows, with the tensor's own shape."""

    def change(tensors: Tensors) -> None:
        for module in modules or modules_of(tensors):
            scale = tensors[f"{module}.weight_scale"]
            rows, cols = scale.shape
            assert rows % 128 == 0
            assert cols % 4 == 0
            swizzled = swizzled_order(rows, cols)
            tensors[f"{module}.weight_scale"] = (
                scale.view(torch.uint8).view(-1)[swizzled].view(scale.dtype).view(scale.shape)
            )

    return on_tensors(change)


def swizzle_padded_scales(*modules: str) -> Break:
    """The same for any shape: rows padded to 128 and columns to 4, with zeros."""

    def change(tensors: Tensors) -> None:
        for module in modules:
            scale = tensors[f"{module}.weight_scale"]
            rows, cols = -(-scale.shape[0] // 128) * 128, -(-scale.shape[1] // 4) * 4
            padded = torch.zeros(rows, cols, dtype=torch.uint8)
            padded[: scale.shape[0], : scale.shape[1]] = scale.view(torch.uint8)
            swizzled = padded.view(-1)[swizzled_order(rows, cols)]
            tensors[f"{module}.weight_scale"] = swizzled.view(scale.dtype).view(rows, cols)

    return on_tensors(change)


def swizzled_order(rows: int, cols: int) -> Tensor:
    """Position in the row-major matrix of each entry of the swizzled one, written out from the formula."""
    order = torch.empty(rows * cols, dtype=torch.int64)
    for r in range(rows):
        for c in range(cols):
            offset = ((r // 128) * (cols // 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
            order[offset] = r * cols + c
    return order


def pad_scale_rows(module: str, rows: int = 128) -> Break:
    """Scales of a padded weight over an unpadded one."""

    def change(tensors: Tensors) -> None:
        scale = tensors[f"{module}.weight_scale"]
        padded = torch.zeros(rows, scale.shape[1], dtype=torch.uint8)
        padded[: scale.shape[0]] = scale.view(torch.uint8)
        tensors[f"{module}.weight_scale"] = padded.view(scale.dtype)

    return on_tensors(change)


def shuffle_rows(module: str) -> Break:
    """Another order of rows: a permutation that was not undone, or tensors of another layer."""

    def change(tensors: Tensors) -> None:
        for tensor in (weight_of(tensors, module), tensors[f"{module}.weight_scale"].view(torch.uint8)):
            tensor.copy_(tensor.flip(0))

    return on_tensors(change)


def other_codes(module: str) -> Break:
    """Codes of a weight that has nothing to do with the source's."""

    def change(tensors: Tensors) -> None:
        packed = weight_of(tensors, module)
        packed.copy_(torch.randint(256, packed.shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8))

    return on_tensors(change)


# ---------------------------------------------------------------- what is quantized and what is not


def nvfp4(weight: Tensor, module: str, *, input_scale: float | None = 0.01) -> Tensors:
    """A float weight [N, K] as Model Optimizer stores it, round to nearest."""
    blocks = weight.float().unflatten(-1, (-1, 16))
    global_scale = weight.float().abs().amax() / (6 * E4M3_MAX)
    scale = (blocks.abs().amax(-1) / (6 * global_scale)).clamp(E4M3_STEP, E4M3_MAX).to(torch.float8_e4m3fn)
    scaled = blocks / (scale.float() * global_scale).unsqueeze(-1)
    codes = EVEN_FIRST[(scaled.unsqueeze(-1) - E2M1[EVEN_FIRST]).abs().min(-1).indices].to(torch.uint8).flatten(-2)
    stored = {
        f"{module}.weight": pack(codes),
        f"{module}.weight_scale": scale,
        f"{module}.weight_scale_2": global_scale,
    }
    return stored if input_scale is None else {**stored, f"{module}.input_scale": torch.tensor(input_scale)}


def quantize(module: str, *, input_scale: float | None = 0.01) -> Break:
    """A kept weight becomes NVFP4."""

    def change(tensors: Tensors) -> None:
        tensors.update(nvfp4(tensors.pop(f"{module}.weight"), module, input_scale=input_scale))

    return on_tensors(change)


def unquantize(*modules: str) -> Break:
    """NVFP4 becomes bf16 with the same values to its precision; without names, every linear."""

    def change(tensors: Tensors) -> None:
        for module in modules or modules_of(tensors):
            weight = decode(tensors, module).bfloat16()
            for name in [name for name in tensors if name.startswith(f"{module}.") and "bias" not in name]:
                del tensors[name]
            tensors[f"{module}.weight"] = weight

    return on_tensors(change)


def to_fp8(module: str) -> Break:
    """NVFP4 becomes FP8 with one scale."""

    def change(tensors: Tensors) -> None:
        weight = decode(tensors, module).float()
        scale = weight.abs().amax() / E4M3_MAX
        del tensors[f"{module}.weight_scale_2"]
        tensors[f"{module}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[f"{module}.weight_scale"] = scale

    return on_tensors(change)


def narrow(module: str, k: int) -> Break:
    """A weight whose K is no multiple of 16: its last block has no scale."""

    def change(tensors: Tensors) -> None:
        tensors[f"{module}.weight"] = pack(unpack(weight_of(tensors, module))[:, :k])
        tensors[f"{module}.weight_scale"] = tensors[f"{module}.weight_scale"][:, : k // 16].contiguous()

    return on_tensors(change)


def packed_head(*, input_scale: float | None) -> Break:
    """A quantized head beside the embedding that it is tied to."""

    def change(tensors: Tensors) -> None:
        tensors.update(nvfp4(tensors["model.embed_tokens.weight"], "lm_head", input_scale=input_scale))

    return on_tensors(change)


def as_it_is(folder: Path) -> None:
    """Nothing is broken: the fault is the model's own."""
