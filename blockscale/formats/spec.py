"""What each format is, as data: the element, the block that shares a scale, and the scale's own type."""

from dataclasses import dataclass
from enum import Enum

from blockscale.errors import FormatError


@dataclass(frozen=True)
class Minifloat:
    """A small float: sign, `exponent_bits`, `mantissa_bits`, subnormals, saturating at `max`.

    Code layout is sign | exponent | mantissa from the top bit down (OCP MX v1.0, section 5.3).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest binade: the `emax` of the OCP MX scale rules."""
        import math

        return math.frexp(self.max)[1] - 1


@dataclass(frozen=True)
class Integer:
    """A signed two's-complement integer whose symmetric range is -max..max."""

    name: str
    bits: int
    max: float


class Granularity(Enum):
    """Which elements share one scale."""

    BLOCK = "block"  # consecutive elements along the last dimension
    TENSOR = "tensor"
    CHANNEL = "channel"  # a row of a weight [N, K]
    TOKEN = "token"  # a row of an activation [..., K], computed when it runs
    TILE = "tile"  # block_size x block_size of a 2-D weight


class ScaleType(Enum):
    """How one scale is stored."""

    E4M3 = "e4m3"
    E8M0 = "e8m0"
    FP32 = "fp32"
    BF16 = "bf16"


SCALE_BITS = {ScaleType.E4M3: 8, ScaleType.E8M0: 8, ScaleType.FP32: 32, ScaleType.BF16: 16}

E2M1 = Minifloat("e2m1", 2, 1, 1, 6.0)
E2M3 = Minifloat("e2m3", 2, 3, 1, 7.5)
E3M2 = Minifloat("e3m2", 3, 2, 3, 28.0)
E4M3 = Minifloat("e4m3", 4, 3, 7, 448.0)
E5M2 = Minifloat("e5m2", 5, 2, 15, 57344.0)
INT4 = Integer("int4", 4, 7.0)


@dataclass(frozen=True)
class Format:
    """One storage format: x ~= element(code) * block_scale [* global_scale].

    `block_size` is the length of a block (BLOCK) or the side of a tile (TILE), and 0 where a scale covers whole
    rows or the whole tensor.
    """

    name: str
    element: Minifloat | Integer
    granularity: Granularity
    block_size: int
    scale: ScaleType
    # Two-level formats: the element * block_scale that the tensor's amax maps to; its quotient is the global scale.
    unscaled_max: float | None = None

    @property
    def has_global_scale(self) -> bool:
        return self.unscaled_max is not None

    @property
    def bits_per_element(self) -> float:
        """Bits an element costs with its share of block scales; scales of rows and tensors count as nothing."""
        if self.granularity is Granularity.BLOCK:
            return self.element.bits + SCALE_BITS[self.scale] / self.block_size
        if self.granularity is Granularity.TILE:
            return self.element.bits + SCALE_BITS[self.scale] / self.block_size**2
        return float(self.element.bits)


_BLOCK, _TILE = Granularity.BLOCK, Granularity.TILE
_ALL = (
    Format("nvfp4", E2M1, _BLOCK, 16, ScaleType.E4M3, unscaled_max=E2M1.max * E4M3.max),
    # Model Optimizer's W4A8_NVFP4_FP8 weights: over 32 elements, and element * block_scale must fit FP8.
    Format("nvfp4-block32", E2M1, _BLOCK, 32, ScaleType.E4M3, unscaled_max=E4M3.max),
    Format("mxfp4", E2M1, _BLOCK, 32, ScaleType.E8M0),
    Format("mxfp6-e2m3", E2M3, _BLOCK, 32, ScaleType.E8M0),
    Format("mxfp6-e3m2", E3M2, _BLOCK, 32, ScaleType.E8M0),
    Format("mxfp8", E4M3, _BLOCK, 32, ScaleType.E8M0),
    Format("mxfp8-e5m2", E5M2, _BLOCK, 32, ScaleType.E8M0),
    Format("fp8", E4M3, Granularity.TENSOR, 0, ScaleType.FP32),
    Format("fp8-channel", E4M3, Granularity.CHANNEL, 0, ScaleType.FP32),
    Format("fp8-token", E4M3, Granularity.TOKEN, 0, ScaleType.FP32),
    Format("fp8-block128", E4M3, _TILE, 128, ScaleType.FP32),
    Format("fp8-e5m2", E5M2, Granularity.TENSOR, 0, ScaleType.FP32),
    Format("fp8-e5m2-channel", E5M2, Granularity.CHANNEL, 0, ScaleType.FP32),
    Format("fp8-e5m2-token", E5M2, Granularity.TOKEN, 0, ScaleType.FP32),
    Format("fp8-e5m2-block128", E5M2, _TILE, 128, ScaleType.FP32),
    Format("int4-g16", INT4, _BLOCK, 16, ScaleType.BF16),
    Format("int4-g32", INT4, _BLOCK, 32, ScaleType.BF16),
    Format("int4-g128", INT4, _BLOCK, 128, ScaleType.BF16),
)
FORMATS: dict[str, Format] = {f.name: f for f in _ALL}
NVFP4, NVFP4_BLOCK32, MXFP4 = FORMATS["nvfp4"], FORMATS["nvfp4-block32"], FORMATS["mxfp4"]
FP8, FP8_CHANNEL, FP8_TOKEN, FP8_BLOCK128 = (FORMATS[n] for n in ("fp8", "fp8-channel", "fp8-token", "fp8-block128"))


def get_format(name: "str | Format") -> Format:
    """The format of that name; FormatError lists the names there are."""
    if isinstance(name, Format):
        return name
    if name not in FORMATS:
        raise FormatError(f"unknown format '{name}'", hint="formats: " + ", ".join(FORMATS))
    return FORMATS[name]
