"""Every fault of a checkpoint that lint has a rule for, each as a function that breaks a good folder.

`FAULTS` is the table. Tests break a copy of the fault's base with `broken` and ask lint what it says.
"""

import shutil
import tempfile
from pathlib import Path

from .bases import BASES, Find
from .fault import Fault
from .table_branches import BRANCHES
from .table_configs import CONFIGS
from .table_files import FILES
from .table_layout import LAYOUT
from .table_scales import SCALES

FAULTS: tuple[Fault, ...] = (*SCALES, *BRANCHES, *FILES, *CONFIGS, *LAYOUT)

# name -> code. Severity is "error" unless the next table says so.
RULES = {
    "fused-global-scale-mismatch": "BS101",
    "fused-input-scale-mismatch": "BS102",
    "fused-formats-differ": "BS103",
    "nan-block-scale": "BS104",
    "negative-block-scale": "BS105",
    "zero-block-scales": "BS106",
    "bad-global-scale": "BS107",
    "denormal-global-scale": "BS108",
    "reversed-global-scale": "BS109",
    "missing-block-scale": "BS110",
    "missing-global-scale": "BS111",
    "missing-input-scale": "BS112",
    "loose-scale": "BS113",
    "one-sided-kv-scale": "BS114",
    "experts-incomplete": "BS115",
    "zero-weight-as-nan": "BS116",
    "subnormal-block-scales": "BS117",
    "odd-input-scale": "BS118",
    "unread-input-scale": "BS119",
    "bad-branch": "BS120",
    "unreadable-file": "BS201",
    "missing-shard": "BS202",
    "ghost-index-entry": "BS203",
    "unindexed-tensor": "BS204",
    "duplicate-tensor": "BS205",
    "unsafe-path": "BS206",
    "malformed-json": "BS207",
    "pickle-weights": "BS208",
    "wrong-total-size": "BS209",
    "unwritten-data": "BS210",
    "missing-index": "BS211",
    "no-quantization-config": "BS301",
    "nothing-quantized": "BS302",
    "unknown-algorithm": "BS303",
    "excluded-but-quantized": "BS304",
    "kept-but-not-excluded": "BS305",
    "exclude-matches-nothing": "BS306",
    "exclude-read-differently": "BS307",
    "configs-disagree": "BS308",
    "format-mismatch": "BS309",
    "mixed-layers-mismatch": "BS310",
    "quantized-tied-head": "BS311",
    "quantized-lm-head": "BS312",
    "kv-config-mismatch": "BS313",
    "draft-layer-format": "BS314",
    "tower-quantized": "BS315",
    "router-quantized": "BS316",
    "missing-layers": "BS317",
    "missing-tensor": "BS318",
    "missing-draft-layers": "BS319",
    "quantized-embedding": "BS320",
    "kv-scales-missing": "BS321",
    "ignored-head": "BS322",
    "unknown-activation-scale": "BS323",
    "swapped-nibbles": "BS401",
    "swizzled-scales": "BS402",
    "differs-from-source": "BS403",
    "wrong-global-shape": "BS404",
    "far-from-source": "BS405",
    "source-not-compared": "BS406",
    "untileable-dimension": "BS501",
    "unshardable-dimension": "BS502",
}
NO_ERRORS = {
    "zero-block-scales": "warning",
    "subnormal-block-scales": "warning",
    "odd-input-scale": "warning",
    "unread-input-scale": "info",
    "missing-index": "warning",
    "kv-scales-missing": "warning",
    "far-from-source": "warning",
    "source-not-compared": "warning",
    "pickle-weights": "warning",
    "exclude-read-differently": "warning",
    "quantized-lm-head": "warning",
    "tower-quantized": "warning",
    "wrong-global-shape": "warning",
    "untileable-dimension": "warning",
    "wrong-total-size": "info",
    "exclude-matches-nothing": "info",
    "missing-draft-layers": "info",
}


def severity(rule: str) -> str:
    return NO_ERRORS.get(rule, "error")


class Bases:
    """Good folders by name, each made once below `parent` and read only from then on."""

    def __init__(self, parent: Path, tiny_model: Find) -> None:
        self._parent, self._tiny_model = parent, tiny_model
        self._made: dict[str, Path] = {}

    def __getitem__(self, name: str) -> Path:
        if name not in self._made:
            parent = Path(tempfile.mkdtemp(dir=self._parent))  # a base that fails to be made is tried again elsewhere
            self._made[name] = BASES[name](parent, self._tiny_model)
        return self._made[name]


def broken(fault: Fault, base: Path, parent: Path) -> Path:
    """A copy of the base below `parent`, broken."""
    folder = Path(shutil.copytree(base, parent / "broken"))
    fault.break_(folder)
    return folder
