"""How stored elements become fp16: the PTX itself, evaluated on every byte, and the plain operations beside it."""

import re

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from blockscale.formats.minifloat import decode_table
from blockscale.formats.spec import E2M1, E4M3
from blockscale.kernels.triton import kv_decode
from tests.kernels.interpreter import interpreted

plain = interpreted("blockscale.kernels.triton.kv_decode")
MASK = 0xFFFFFFFF


def evaluate(ptx: str, operands: dict[str, int]) -> dict[str, int]:
    """Registers after a straight line of 32-bit PTX: mov, prmt, and, add, shl, shr, lop3 (0xF8), mul.rn.f16x2."""
    registers = dict(operands)

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for operation, rest in re.findall(r"([a-z][\w.]*) ([^;{}]+);", re.sub(r"\.reg [^;]*;", "", ptx)):
        target, *names = (name.strip() for name in rest.split(","))
        arguments = [value(n) for n in names]
        if operation == "mov.b32":
            result = arguments[0]
        elif operation == "prmt.b32":
            pool = arguments[0].to_bytes(4, "little") + arguments[1].to_bytes(4, "little")
            selected = [(arguments[2] >> 4 * i) & 0xF for i in range(4)]
            assert all(s < 8 for s in selected)
            result = int.from_bytes(bytes(pool[s] for s in selected), "little")
        elif operation == "and.b32":
            result = arguments[0] & arguments[1]
        elif operation == "add.u32":
            result = arguments[0] + arguments[1]
        elif operation == "shl.b32":
            result = arguments[0] << arguments[1]
        elif operation == "shr.b32":
            result = arguments[0] >> arguments[1]
        elif operation == "lop3.b32":
            assert arguments[3] == 0xF8
            result = arguments[0] | (arguments[1] & arguments[2])
        elif operation == "mul.rn.f16x2":
            result = to_word(to_halves(arguments[0]) * to_halves(arguments[1]))
        else:
            raise AssertionError(operation)
        registers[target] = result & MASK
    return registers


def to_halves(word: int) -> Tensor:
    """fp16 [2], the low half first."""
    return torch.tensor([word - (word >> 31 << 32)], dtype=torch.int32).view(torch.float16)


def to_word(halves: Tensor) -> int:
    return int(halves.to(torch.float16).view(torch.int32).item()) & MASK


def words() -> list[int]:
    """Every byte value in every one of four places, beside different neighbours."""
    return [int.from_bytes(bytes(((b + 71 * i) & 0xFF) for i in range(4)), "little") for b in range(256)]


def test_nibbles_ptx_gives_codes_in_the_order_0_2_1_3() -> None:
    table = decode_table(E2M1)
    for word in words():
        stored = word.to_bytes(4, "little")
        registers = evaluate(kv_decode._NIBBLES.value, {"$4": word})
        found = torch.cat([to_halves(registers[f"${i}"]) for i in range(4)]).float() * 2.0**14
        order = [stored[0], stored[2], stored[1], stored[3]]
        codes = [b & 0xF for b in order] + [b >> 4 for b in order]
        assert torch.equal(found, table[codes])
        assert torch.equal(found.signbit(), table[codes].signbit())


def test_e4m3_ptx_of_ampere_is_exact_with_nan() -> None:
    table = decode_table(E4M3)
    for word in words():
        registers = evaluate(kv_decode._CONVERT_BITS.value, {"$2": word})
        found = torch.cat([to_halves(registers[f"${i}"]) for i in range(2)]).float()
        torch.testing.assert_close(found, table[list(word.to_bytes(4, "little"))], rtol=0, atol=0, equal_nan=True)


def test_nvfp4_products_are_exact_in_fp16() -> None:
    """Every code times every scale, in the order and with the powers of two of `nvfp4_values`."""
    code = (decode_table(E2M1) * 2.0**-14).half()
    scale = decode_table(E4M3).half() * 64
    product = code[:, None] * scale[None, :]
    exact = decode_table(E2M1)[:, None].double() * decode_table(E4M3)[None, :].double() / kv_decode.NVFP4_UNIT.value
    torch.testing.assert_close(product.double(), exact, rtol=0, atol=0, equal_nan=True)


def test_plain_e4m3_is_exact_with_nan() -> None:
    def kernel(x_ptr, y_ptr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, 256)
        tl.store(y_ptr + at, plain.e4m3_plain(tl.load(x_ptr + at)))

    y = torch.empty(256, dtype=torch.float16)
    InterpretedFunction(kernel)[(1,)](torch.arange(256, dtype=torch.uint8), y)
    torch.testing.assert_close(y.float(), decode_table(E4M3), rtol=0, atol=0, equal_nan=True)
