"""Faults of files and of the index."""

from .breaking_files import (
    CONFIG,
    HF_QUANT_CONFIG,
    add_to_index,
    all_of,
    copy_into,
    cut,
    cut_in_header,
    cut_text,
    drop_from_index,
    empty_file,
    extra_file,
    flip_header_bit,
    header_length,
    large_file_pointer,
    overlapping_tensors,
    pickle_file,
    point_to,
    remove_index,
    remove_shard,
    total_size,
    two_files_without_index,
    unwritten,
    web_page,
    write_text,
    wrong_dtype_in_header,
)
from .fault import Fault
from .raw import INDEX, SINGLE
from .table_scales import A16, CT, CT_3, DOWN, MOE_5, NVFP4, NVFP4_3

FIRST, SECOND, THIRD = (f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3))
NORM = "model.norm.weight"
DRAFT = tuple(f"mtp.layers.0.{name}.weight" for name in ("eh_proj", "enorm", "hnorm"))

UNREADABLE = (
    Fault("cut short", "B10", NVFP4, cut(1000), "unreadable-file", SINGLE, False),
    Fault("cut by a byte", "B10", CT_3, cut(1), "unreadable-file", THIRD, False),
    Fault("cut within its header", "B10", NVFP4_3, cut_in_header, "unreadable-file", THIRD, False),
    Fault("empty", "B10", NVFP4_3, empty_file, "unreadable-file", THIRD, False),
    Fault("a header of 10 GB", "B10", NVFP4, header_length(10 << 30), "unreadable-file", SINGLE, False),
    Fault("a header of 2^64 - 1 bytes", "B10", NVFP4, header_length(2**64 - 1), "unreadable-file", SINGLE, False),
    Fault("a flipped bit in the header", "B10", NVFP4, flip_header_bit(40), "unreadable-file", SINGLE, False),
    Fault("a dtype that does not fit", "B10", CT, wrong_dtype_in_header(NORM), "unreadable-file", SINGLE, False),
    Fault("two tensors in the same bytes", "B10", NVFP4, overlapping_tensors(f"{DOWN}.weight", NORM),
          "unreadable-file", SINGLE, False),
    Fault("a web page", "B10", NVFP4_3, web_page, "unreadable-file", THIRD, False),
    Fault("a pointer to a large file", "B10", NVFP4_3, large_file_pointer, "unreadable-file", THIRD, False),
)  # fmt: skip

SHARDS = (
    Fault("a shard less", "B10", NVFP4_3, remove_shard(1), "missing-shard", SECOND, False),
    Fault("a shard less, ct", "B10", CT_3, remove_shard(-1), "missing-shard", THIRD, False),
    Fault("no weights", "B10", NVFP4, remove_shard(0), "missing-shard", None, False),
    Fault("entries of a draft layer that is not there", "B8", NVFP4_3, add_to_index(None, *DRAFT),
          "ghost-index-entry", DRAFT[0], True),
    Fault("entries of a draft layer that is not there, ct", "B8", CT_3, add_to_index(None, *DRAFT),
          "ghost-index-entry", DRAFT[0], True),
    Fault("an entry that points to the wrong shard", "B10", NVFP4_3, point_to(f"{DOWN}.weight", None),
          "ghost-index-entry", f"{DOWN}.weight", True),
    Fault("tensors that the index lacks", "B10", NVFP4_3, drop_from_index(f"{DOWN}.input_scale"), "unindexed-tensor",
          f"{DOWN}.input_scale", True),
    Fault("an expert that the index lacks", "B10", MOE_5,
          drop_from_index(*(f"model.layers.1.mlp.experts.3.up_proj.{s}" for s in ("weight", "weight_scale"))),
          "unindexed-tensor", "model.layers.1.mlp.experts.3.up_proj.weight", True),
    Fault("a file of its own that the index lacks", "B8", NVFP4_3, extra_file("mtp.safetensors", *DRAFT),
          "unindexed-tensor", DRAFT[0], True),
    Fault("a file of its own beside the one", "B8", CT, extra_file("mtp.safetensors", *DRAFT), "unindexed-tensor",
          DRAFT[0], True),
    Fault("a stale copy in another shard", "B10", NVFP4_3, copy_into(NORM, FIRST), "duplicate-tensor", NORM, True),
    Fault("a stale scale in another shard", "B10", CT_3, copy_into(f"{DOWN}.weight_global_scale", FIRST),
          "duplicate-tensor", f"{DOWN}.weight_global_scale", True),
    Fault("no index of 3 files", "B10", NVFP4_3, remove_index, "missing-index", INDEX, True),
    Fault("no index of 3 files, ct", "B10", CT_3, remove_index, "missing-index", INDEX, True),
    Fault("two files and no index", "B10", A16, two_files_without_index, "duplicate-tensor", None, False),
    Fault("../../etc/x", "B10", NVFP4_3, add_to_index("../../etc/x", "x.weight"), "unsafe-path", INDEX, False),
    Fault("/etc/passwd", "B10", NVFP4_3, add_to_index("/etc/passwd", "x.weight"), "unsafe-path", INDEX, False),
    Fault("a known tensor outside", "B10", CT_3, point_to(NORM, "../outside.safetensors"), "unsafe-path", INDEX, True),
    Fault("pickled weights", "B10", NVFP4, pickle_file("pytorch_model.bin"), "pickle-weights", "pytorch_model.bin",
          True),
    Fault("pickled weights, pt", "B10", CT_3, pickle_file("adapter.pt"), "pickle-weights", "adapter.pt", True),
    Fault("the size of a 16-bit model", "B10", NVFP4_3, total_size(215_000), "wrong-total-size", INDEX, True),
    Fault("the size of another model, ct", "B10", CT_3, total_size(1), "wrong-total-size", INDEX, True),
    Fault("a download that is not finished", "B4", NVFP4, unwritten, "unwritten-data", None, False),
    Fault("a download that is not finished, ct", "B4", CT_3, unwritten, "unwritten-data", None, False),
)  # fmt: skip

JSON = (
    Fault("config cut short", "B10", NVFP4, cut_text(CONFIG), "malformed-json", CONFIG, False),
    Fault("config is a list", "B10", CT, write_text(CONFIG, "[]"), "malformed-json", CONFIG, False),
    Fault("config is a web page", "B10", CT, write_text(CONFIG, "<!DOCTYPE html>"), "malformed-json", CONFIG, False),
    Fault("second config cut short", "B10", NVFP4, cut_text(HF_QUANT_CONFIG), "malformed-json", HF_QUANT_CONFIG, True),
    Fault("index cut short", "B10", NVFP4_3, cut_text(INDEX), "malformed-json", INDEX, True),
    Fault("index without a map", "B10", CT_3, write_text(INDEX, "{}"), "malformed-json", INDEX, True),
    Fault("index and shards from two downloads", "B10", NVFP4_3, all_of(cut_text(INDEX), remove_shard(0)),
          "malformed-json", INDEX, False),
)  # fmt: skip

FILES = (*UNREADABLE, *SHARDS, *JSON)
