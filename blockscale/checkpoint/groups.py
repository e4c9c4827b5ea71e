"""Weights that engines fuse into one, and that must therefore share a global scale and a format."""

from collections.abc import Iterable

# Leaves below one parent. vLLM, SGLang and TensorRT-LLM concatenate each set at load and keep one scalar scale for it.
FUSED_LEAVES = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
_LEAF_SET = {leaf: leaves for leaves in FUSED_LEAVES for leaf in leaves}


_WRAPPER = ".linear"  # some models wrap each projection in a module that clips its input


def fused_groups(modules: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Group name -> its members, in the order given; a module that is fused with nothing is a group of its own."""
    groups: dict[str, list[str]] = {}
    for module in modules:
        groups.setdefault(group_name(module), []).append(module)
    return {name: tuple(members) for name, members in groups.items()}


def group_name(module: str) -> str:
    """`a.b.q_proj` -> `a.b.q_proj+k_proj+v_proj`; a name that is not fused stays as it is."""
    parent, dot, leaf = module.removesuffix(_WRAPPER).rpartition(".")
    return parent + dot + "+".join(_LEAF_SET[leaf]) if leaf in _LEAF_SET else module


def expert_set(module: str) -> str | None:
    """`a.experts.3.up_proj` -> `a.experts`: engines run all experts of a layer in one kernel. None for the rest."""
    head, found, _ = module.partition(".experts.")
    return head + ".experts" if found else None
