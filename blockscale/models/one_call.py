"""Layers that the CPU's kernels compute in one call, for few tokens at a time."""

from collections.abc import Sequence

from torch import Tensor

from blockscale.kernels.cpu.layers import DecodeLayers, LayerWeights, Matrix, Shape, decode_layers
from blockscale.kernels.prepare import PreparedWeight
from blockscale.models.config import Activation, DecoderConfig
from blockscale.models.layers import PackedProduct, PlainProduct, Product
from blockscale.models.llama import FeedForward, LlamaLayer


def in_one_call(layers: Sequence[object], config: DecoderConfig) -> DecodeLayers | None:
    """None unless all are dense layers of Llama's kind whose products are of weights alone, on this device alone."""
    found = [_weights(layer) for layer in layers]
    weights = [one for one in found if one is not None]
    if not weights or len(weights) < len(found):
        return None
    shape = Shape(
        config.hidden,
        config.inner,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.epsilon,
        config.scale,
        config.attention_softcap,
    )
    return decode_layers(weights, shape)


def _weights(layer: object) -> LayerWeights | None:
    if not isinstance(layer, LlamaLayer) or not isinstance(layer.feed_forward, FeedForward):
        return None
    if layer.feed_forward.activation is not Activation.SILU:
        return None
    own, feed_forward = layer.attention, layer.feed_forward
    qkv, o = _matrix(own.qkv), _matrix(own.o)
    gate_up, down = _matrix(feed_forward.gate_up), _matrix(feed_forward.down)
    if qkv is None or o is None or gate_up is None or down is None:
        return None
    norms = layer.input_norm, layer.middle_norm, own.norms, own.rule.sinks
    return LayerWeights(*norms, qkv, o, gate_up, down, own.rule.window)


def _matrix(product: Product) -> Matrix | None:
    if not isinstance(product, PackedProduct | PlainProduct):
        return None
    weight: PreparedWeight | Tensor = product.weight
    return Matrix(weight, product.bias)
