"""Sizes that engines cannot tile, or cannot share out among GPUs.

Of a pair of layers the first is split along its rows (N) and the second along its columns (K), so that only sums travel
between GPUs. A split along K must not cut a block, whose scale is one number. Source: vLLM 0.33, SGLang 0.5.23.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.groups import expert_set, fused_groups
from blockscale.checkpoint.structure import TOWER, text_config
from blockscale.errors import UsageError
from blockscale.formats.spec import Format, Granularity
from blockscale.inspection.matrices import Matrix, matrices_of
from blockscale.inspection.reading import Reading

_TILE = 32  # of 4-bit kernels along K: two columns of scales
_FP8_TILE = 16
_VOCABULARY_TILE = 64  # vLLM and SGLang pad the vocabulary to this before they split it
_BY_ROWS = ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "fc1", "linear_fc1", "q_b_proj", "kv_b_proj")
_BY_COLUMNS = ("o_proj", "out_proj", "down_proj", "w2", "wo", "fc2", "linear_fc2", "c_proj", "dense_4h_to_h")


def limit_faults(
    reading: Reading, tensor_parallel: int = 1, matrices: Sequence[Matrix] | None = None
) -> Iterator[Fault]:
    """BS501, and BS502 for so many GPUs. UsageError for a number of GPUs that is none."""
    if tensor_parallel < 1:
        raise UsageError(f"not a number of GPUs: {tensor_parallel}", hint="tensor_parallel is 1 or more")
    if reading.model is None:
        return
    matrices = matrices_of(reading) if matrices is None else matrices
    matrices = [m for m in matrices if m.scheme is not None and len(m.shape) > 1]  # others have faults of their own
    yield from _untileable(matrices, tensor_parallel)
    if tensor_parallel > 1 and matrices:
        yield from _unshardable_counts(text_config(reading.folder.config), tensor_parallel)
        yield from _unshardable(matrices, tensor_parallel)


# ---------------------------------------------------------------- tiles


def _untileable(matrices: Sequence[Matrix], tensor_parallel: int) -> Iterator[Fault]:
    by_module = {m.module: m for m in matrices if expert_set(m.module) is None}
    for name, members in fused_groups(by_module).items():
        first = by_module[members[0]]
        assert first.scheme is not None
        fmt = first.scheme.weight
        n, k = sum(by_module[m].shape[-2] for m in members), first.shape[-1]
        is_split = tensor_parallel > 1 and _is_split(first, _BY_COLUMNS)
        if is_split and k % (tensor_parallel * _block(fmt)):
            continue  # it cannot be split at all
        k_each = k // tensor_parallel if is_split else k
        is_4bit = fmt.element.bits == 4
        tile = _TILE if is_4bit else _FP8_TILE
        wrong = [f"K = {k_each}" + (" a GPU" if is_split else "")] if k_each % tile else []
        wrong += [f"N = {n}"] if not is_4bit and n % tile else []  # 4-bit kernels pad rows
        if wrong:
            what = f"{name}: {' and '.join(wrong)}, where {fmt.name} kernels work on multiples of {tile}"
            yield Fault("untileable-dimension", name, what, "keep it in 16 bits, or pad it", is_fatal=False)


def _block(fmt: Format) -> int:
    """Elements along K that share a scale and must stay together."""
    return fmt.block_size if fmt.granularity is Granularity.BLOCK else 1


# ---------------------------------------------------------------- shards


def _unshardable_counts(text: Mapping[str, Any], gpus: int) -> Iterator[Fault]:
    """What the config counts: heads are not cut, and key-value heads are split or copied."""

    def unshardable(what: str) -> Fault:
        hint = "use another number of GPUs"
        return Fault("unshardable-dimension", "config.json", f"{what} cannot be split over {gpus} GPUs", hint, False)

    heads, kv_heads = _count(text, "num_attention_heads"), _count(text, "num_key_value_heads")
    vocabulary = _count(text, "vocab_size")
    if heads and heads % gpus:
        yield unshardable(f"{heads} attention heads")
    elif kv_heads and kv_heads % gpus and gpus % kv_heads:
        yield unshardable(f"{kv_heads} key-value heads")
    elif vocabulary and -(-vocabulary // _VOCABULARY_TILE) * _VOCABULARY_TILE % gpus:
        yield unshardable(f"a vocabulary of {vocabulary}, padded to a multiple of {_VOCABULARY_TILE},")


def _unshardable(matrices: Sequence[Matrix], gpus: int) -> Iterator[Fault]:
    for matrix in matrices:
        assert matrix.scheme is not None
        if matrix.reason == TOWER:
            continue
        *_, n, k = matrix.shape
        block = _block(matrix.scheme.weight)
        if _is_split(matrix, _BY_COLUMNS) and k % (gpus * block):
            what = f"{matrix.module}: K = {k} over {gpus} GPUs" + (f" cuts a block of {block}" if block > 1 else "")
        elif _is_split(matrix, _BY_ROWS) and n % gpus:
            what = f"{matrix.module}: N = {n} over {gpus} GPUs"
        else:
            continue
        hint = "split experts, not matrices (expert parallel)" if expert_set(matrix.module) else "use fewer GPUs"
        yield Fault("unshardable-dimension", matrix.module, what, hint, is_fatal=False)


def _is_split(matrix: Matrix, leaves: Sequence[str]) -> bool:
    return matrix.module.rpartition(".")[2] in leaves


def _count(text: Mapping[str, Any], key: str) -> int | None:
    value = text.get(key)
    return value if type(value) is int and value > 0 else None
