"""AWQ's and GPTQ's checkpoints, packed word by word in Python's integers from the formats' definitions, and the weights
that they stand for: (code - zero point) * scale in float64, rounded once."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of one word, lowest nibble first


@dataclass(frozen=True)
class Linear:
    """codes [K][N], zeros [G][N], groups [K], as lists; scales [G, N]."""

    bits: int
    codes: list[list[int]]
    zeros: list[list[int]]
    groups: list[int]
    scales: Tensor

    @property
    def value(self) -> Tensor:
        """[N, K] in the scales' dtype."""
        difference = [
            [code - zero for code, zero in zip(row, self.zeros[group], strict=True)]
            for row, group in zip(self.codes, self.groups, strict=True)
        ]
        exact = torch.tensor(difference, dtype=torch.float64) * self.scales.double()[self.groups]
        return exact.t().contiguous().to(self.scales.dtype)


def draw_linear(
    n: int,
    k: int,
    group_size: int,
    *,
    bits: int = 4,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
    shuffled: bool = False,
    symmetric: bool = False,
) -> Linear:
    """Codes, zero points and scales of every size; `shuffled` as by activation order."""
    draw = random.Random(seed)
    top = (1 << bits) - 1
    groups = [i // group_size for i in range(k)]
    if shuffled:
        draw.shuffle(groups)
    codes = [[draw.randint(0, top) for _ in range(n)] for _ in range(k)]
    zeros = [[(top + 1) // 2 if symmetric else draw.randint(0, top) for _ in range(n)] for _ in range(k // group_size)]
    scales = torch.tensor([[draw.uniform(1e-4, 0.1) for _ in range(n)] for _ in zeros], dtype=torch.float64)
    return Linear(bits, codes, zeros, groups, scales.to(dtype))


def words(rows: list[list[int]]) -> Tensor:
    """Words from 0 to 2^32 - 1 as the int32 with the same bits."""
    return torch.tensor([[w - (1 << 32) if w >> 31 else w for w in row] for row in rows], dtype=torch.int32)


def packed(fields: list[int], bits: int) -> int:
    """One word; the first field in the lowest bits."""
    return sum(value << (bits * position) for position, value in enumerate(fields))


def awq_packed(rows: list[list[int]]) -> Tensor:
    """[R][N] -> [R, N/8]."""
    starts = range(0, len(rows[0]), 8)
    return words([[packed([row[start + column] for column in AWQ_COLUMNS], 4) for start in starts] for row in rows])


def awq_parts(linear: Linear, name: str = "a") -> dict[str, Tensor]:
    return {
        f"{name}.qweight": awq_packed(linear.codes),
        f"{name}.qzeros": awq_packed(linear.zeros),
        f"{name}.scales": linear.scales,
    }


def gptq_parts(linear: Linear, name: str = "a", *, version: int = 1) -> dict[str, Tensor]:
    bits, pack = linear.bits, 32 // linear.bits
    outputs = range(len(linear.codes[0]))
    codes = [
        [packed([linear.codes[start + i][n] for i in range(pack)], bits) for n in outputs]
        for start in range(0, len(linear.codes), pack)
    ]
    less = packed([1] * pack, bits) if version == 1 else 0
    zeros = [
        [(packed(row[start : start + pack], bits) - less) % 2**32 for start in outputs[::pack]] for row in linear.zeros
    ]
    return {
        f"{name}.qweight": words(codes),
        f"{name}.qzeros": words(zeros),
        f"{name}.scales": linear.scales,
        f"{name}.g_idx": torch.tensor(linear.groups, dtype=torch.int32),
    }
