from blockscale.checkpoint.groups import expert_set, fused_groups, group_name


def test_what_engines_fuse() -> None:
    names = ["a.q_proj", "a.k_proj", "b.q_proj", "a.v_proj", "a.o_proj", "a.gate_proj", "a.up_proj", "a.down_proj"]
    assert fused_groups(names) == {
        "a.q_proj+k_proj+v_proj": ("a.q_proj", "a.k_proj", "a.v_proj"),
        "b.q_proj+k_proj+v_proj": ("b.q_proj",),
        "a.o_proj": ("a.o_proj",),
        "a.gate_proj+up_proj": ("a.gate_proj", "a.up_proj"),
        "a.down_proj": ("a.down_proj",),
    }


def test_mixtral_and_mla() -> None:
    names = ["x.w1", "x.w2", "x.w3", "y.q_a_proj", "y.q_b_proj", "y.kv_a_proj_with_mqa", "y.kv_b_proj"]
    assert fused_groups(names) == {
        "x.w1+w3": ("x.w1", "x.w3"),
        "x.w2": ("x.w2",),
        "y.q_a_proj+kv_a_proj_with_mqa": ("y.q_a_proj", "y.kv_a_proj_with_mqa"),
        "y.q_b_proj": ("y.q_b_proj",),
        "y.kv_b_proj": ("y.kv_b_proj",),
    }


def test_experts_do_not_share_with_each_other() -> None:
    groups = fused_groups(f"mlp.experts.{e}.{leaf}" for e in range(2) for leaf in ("gate_proj", "up_proj"))
    assert list(groups.values()) == [
        ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj"),
        ("mlp.experts.1.gate_proj", "mlp.experts.1.up_proj"),
    ]


def test_only_whole_names_count() -> None:
    for name in ("a.my_q_proj", "a.q_proj_extra", "a.qkv_proj", "a.gate", "q_projection", "a.gate_up_proj"):
        assert group_name(name) == name


def test_a_name_without_a_parent() -> None:
    assert group_name("q_proj") == "q_proj+k_proj+v_proj"


def test_wrapped_projections() -> None:
    """Some models hold each projection as `.linear` in a module that clips its input."""
    names = [f"layers.0.self_attn.{leaf}.linear" for leaf in ("q_proj", "k_proj", "v_proj", "o_proj")]
    assert list(fused_groups(names).values()) == [tuple(names[:3]), (names[3],)]


def test_expert_sets() -> None:
    assert expert_set("model.layers.3.mlp.experts.17.up_proj") == "model.layers.3.mlp.experts"
    assert expert_set("model.layers.3.mlp.experts.gate_up_proj") == "model.layers.3.mlp.experts"
    assert expert_set("model.layers.3.mlp.shared_experts.up_proj") is None
    assert expert_set("model.layers.3.mlp.gate") is None
