"""The rules of routing, against the routers of transformers and by hand."""

from functools import partial
from typing import Any

import pytest
import torch
from tiny_configs import tiny_config
from torch import Tensor

from blockscale.models.routing import Choice, Router, softmax_then_top, top_of_groups, top_then_softmax

T, K = 64, 64


def drawn(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return module.eval()


def dense_weights(ids: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    """[T, E] with the weights at their experts: the order of the choices does not count."""
    return torch.zeros(len(ids), num_experts).scatter(1, ids, weights.float())


def check(found: Choice, expected: tuple[Any, Tensor, Tensor], num_experts: int) -> None:
    _, weights, ids = expected
    ours = dense_weights(*found, num_experts)
    theirs = dense_weights(ids, weights, num_experts)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_mixtral_and_qwen() -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    x = torch.randn(T, K, generator=torch.Generator().manual_seed(1))
    mixtral: Any = drawn(MixtralTopKRouter(tiny_config("mixtral")))
    rule = partial(softmax_then_top, top_k=2, is_normalized=True)
    check(Router(mixtral.weight, None, rule)(x), mixtral(x), 4)
    for is_normalized in (True, False):
        config = tiny_config("qwen3_moe")
        config.norm_topk_prob = is_normalized
        qwen: Any = drawn(Qwen3MoeTopKRouter(config))
        rule = partial(softmax_then_top, top_k=2, is_normalized=is_normalized)
        check(Router(qwen.weight, None, rule)(x), qwen(x), 4)


def test_gpt_oss() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

    x = torch.randn(T, K, generator=torch.Generator().manual_seed(2))
    router: Any = drawn(GptOssTopKRouter(tiny_config("gpt_oss")))
    check(Router(router.weight, router.bias, partial(top_then_softmax, top_k=2))(x), router(x), 4)


@pytest.mark.parametrize(("num_groups", "num_chosen"), [(1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("is_normalized", [True, False])
def test_deepseek(num_groups: int, num_chosen: int, is_normalized: bool) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    x = torch.randn(T, K, generator=torch.Generator().manual_seed(3))
    config = tiny_config("deepseek_v3")
    config.n_group, config.topk_group, config.norm_topk_prob = num_groups, num_chosen, is_normalized
    router: Any = drawn(DeepseekV3TopkRouter(config))
    rule = partial(
        top_of_groups,
        correction=router.e_score_correction_bias,
        top_k=2,
        num_groups=num_groups,
        num_chosen_groups=num_chosen,
        is_normalized=is_normalized,
        factor=config.routed_scaling_factor,
    )
    check(Router(router.weight, None, rule)(x), router(x), 8)


def test_a_correction_changes_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    rule = partial(top_of_groups, top_k=1, num_groups=1, num_chosen_groups=1, is_normalized=False, factor=1.0)
    ids, _ = rule(logits, correction=torch.zeros(4))
    assert ids.tolist() == [[3]]
    ids, weights = rule(logits, correction=torch.tensor([9.0, 0.0, 0.0, 0.0]))
    assert ids.tolist() == [[0]]
    assert weights.item() == 0.5  # sigmoid(0)
