"""Which tensors the file has and in which type: settled before a byte is written."""

from collections.abc import Sequence
from dataclasses import dataclass

from gguf import GGMLQuantizationType

from blockscale.conversion.gguf.blocks import MXFP4_BLOCK, NVFP4_BLOCK
from blockscale.conversion.gguf.families import Families, Family, Product
from blockscale.conversion.gguf.filling import Filled, fill_slots
from blockscale.conversion.gguf.folding import Fold, find_fold
from blockscale.conversion.gguf.rows import Geometry
from blockscale.conversion.gguf.units import F32, PACKED_KINDS, Unit, bias_unit, packed_unit, plain_unit
from blockscale.conversion.gguf.weights import Inventory
from blockscale.formats.spec import NVFP4

_Q8_0_BLOCK = 32


@dataclass(frozen=True)
class Layout:
    """notices            what is not written as it is stored, and why
    num_decoded        quantized weights that are written without their codes
    wide_activations   4-bit tensors whose inputs must not be rounded to 4 bits
    """

    units: tuple[Unit, ...]
    notices: tuple[str, ...]
    num_decoded: int
    wide_activations: tuple[str, ...]

    @property
    def kinds(self) -> dict[str, int]:
        """Type -> number of weights."""
        counts: dict[str, int] = {}
        for unit in self.units:
            kind = unit.tensors[0].kind.name
            counts[kind] = counts.get(kind, 0) + 1
        return counts


def choose_family(families: Families, inventory: Inventory, *, can_be_other: bool) -> Family:
    """The model's own architecture, unless it would ignore scales that the other applies."""
    has_scales = any(linear.scheme.weight is NVFP4 for linear in inventory.linears.values())
    return families.scaled if families.scaled is not None and has_scales and can_be_other else families.own


def make_layout(
    family: Family, inventory: Inventory, geometry: Geometry, kept: GGMLQuantizationType, *, is_tied: bool
) -> Layout:
    """`kept`: the type of matrices that are not copied. CheckpointError if architecture and checkpoint do not match."""
    filled = fill_slots(family, inventory, geometry, is_tied=is_tied)
    folds = _find_folds(filled)
    units: list[Unit] = []
    reasons: dict[str, list[str]] = {}
    wide = []
    for entry in filled:
        fold = folds.get(entry.fold or "")
        reason = _obstacle(entry) or _graph_obstacle(entry, family, fold)
        if entry.is_quantized and reason is None:
            units.append(packed_unit(entry, fold))
            if all(weight.wants_16bit_activations for weight in entry.weights):
                wide.append(f"{entry.name}.weight")
        else:
            norm_fold = folds.get(entry.name)
            kind = _plain_kind(entry, kept)
            units.append(plain_unit(entry, kind, norm_fold.factor if norm_fold else 1.0))
            if entry.is_quantized:
                reasons.setdefault(f"are decoded to {kind.name}: {reason}", []).append(entry.name)
        if entry.bias is not None:
            units.append(bias_unit(entry))
    notices = tuple(_notice(reason, names) for reason, names in reasons.items())
    return Layout(tuple(units), notices, sum(map(len, reasons.values())), tuple(wide))


def _find_folds(filled: Sequence[Filled]) -> dict[str, Fold]:
    """By the norm's name, where every linear behind it can be packed."""
    behind: dict[str, list[Filled]] = {}
    for entry in filled:
        if entry.fold is not None:
            behind.setdefault(entry.fold, []).append(entry)
    folds = {}
    for norm, entries in behind.items():
        if all(entry.format is NVFP4 and _obstacle(entry) is None for entry in entries):
            fold = find_fold([weight.load() for entry in entries for weight in entry.weights])
            if fold is not None:
                folds[norm] = fold
    return folds


def _obstacle(entry: Filled) -> str | None:
    """Why GGML could not hold the codes, whatever the graph."""
    fmt, columns = entry.format, entry.shape[-1]
    if not entry.is_quantized:
        return None
    if fmt is None:
        return "the experts have different formats"
    if fmt not in PACKED_KINDS:
        return f"GGML has no {fmt.name}"
    if not all(weight.is_packable for weight in entry.weights):
        return "GGUF has no place for the scales of their input's channels (pre_quant_scale)"
    block = NVFP4_BLOCK if fmt is NVFP4 else MXFP4_BLOCK
    if columns % block:
        return f"{columns} columns are no multiple of GGML's {block}"
    return None


def _graph_obstacle(entry: Filled, family: Family, fold: Fold | None) -> str | None:
    """Why llama.cpp would not compute with the codes, or not with their global scale."""
    product = entry.slot.product
    if product in (Product.TABLE, Product.SMALL):
        return "llama.cpp looks for floats here"
    if entry.format is NVFP4 and product is Product.UNSCALED and fold is None:
        return f"llama.cpp's graph of '{family.architecture}' ignores their global scale"
    if entry.format is NVFP4 and product is Product.SCALED_UNBIASED and entry.bias is not None:
        return "llama.cpp would add their bias before it scales"
    return None


def _plain_kind(entry: Filled, kept: GGMLQuantizationType) -> GGMLQuantizationType:
    if entry.slot.product is Product.SMALL:
        return F32
    if kept is GGMLQuantizationType.Q8_0 and entry.shape[-1] % _Q8_0_BLOCK:
        return GGMLQuantizationType.BF16
    return kept


def _notice(reason: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} quantized weights {reason} ({shown})"
