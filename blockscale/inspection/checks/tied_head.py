"""An output head that a tied config leaves unused, although it is not the embedding."""

import os
from collections.abc import Iterator

from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.header import TensorInfo, unreadable
from blockscale.checkpoint.structure import HEAD, kept_reason
from blockscale.inspection.matrices import FLOATS, is_tied
from blockscale.inspection.reading import Reading

_NUM_PIECES, _PIECE_BYTES = 64, 1 << 16  # 4 MiB of a matrix, which may have a gigabyte


def tied_head_faults(reading: Reading) -> Iterator[Fault]:
    """BS322. A stored copy of the embedding is usual and no fault."""
    if not is_tied(reading.folder.config):
        return
    matrices = {
        name: kept_reason(name, info.shape, reading.folder.config)
        for name, info in reading.kept.items()
        if info.dtype in FLOATS and len(info.shape) == 2 and name.endswith(("lm_head.weight", "embed_tokens.weight"))
    }
    heads = [name for name, reason in matrices.items() if reason == HEAD]
    embeddings = [name for name, reason in matrices.items() if reason == "embedding"]
    if len(heads) != 1 or len(embeddings) != 1:
        return
    head, embedding = reading.kept[heads[0]], reading.kept[embeddings[0]]
    if head.dtype != embedding.dtype and head.shape == embedding.shape:
        return  # the same numbers in another type, as far as is known
    try:
        if head.shape == embedding.shape and _look_equal(head, embedding):
            return
    except OSError as e:
        error = unreadable(head.path, e)
        yield Fault("unreadable-file", head.path.name, str(error), error.hint)
        return
    what = f"{head.name} is not {embedding.name}, and tie_word_embeddings is true"
    hint = "set it to false if the model has a head of its own, or delete the head"
    yield Fault("ignored-head", head.name.removesuffix(".weight"), what, hint, is_fatal=False)


def _look_equal(first: TensorInfo, second: TensorInfo) -> bool:
    """Whether pieces that are spread over two tensors of one size are the same."""
    step = max(_PIECE_BYTES, first.num_bytes // _NUM_PIECES)
    with first.path.open("rb", buffering=0) as one, second.path.open("rb", buffering=0) as other:
        for begin in range(0, first.num_bytes, step):
            count = min(_PIECE_BYTES, first.num_bytes - begin)
            piece = os.pread(one.fileno(), count, first.offset + begin)
            if piece != os.pread(other.fileno(), count, second.offset + begin):
                return False
    return True
