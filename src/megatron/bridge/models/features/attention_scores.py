# SPDX-License-Identifier: Apache-2.0
"""Bounds of queries, keys and values (OLMo), and scores that shrink with the depth of a layer (GPT-2)."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Annotated, Any

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

from megatron.bridge.backends.specs.layer_features import with_torch_attention
from megatron.bridge.models.features.feature import LayerFeature, differing
from megatron.bridge.utils.config.ranges import ABOVE_ZERO

_UNSUPPORTED = {"multi_latent_attention": False, "fused_single_qkv_rope": False}


@dataclass
class AttentionScoreFields:
    qkv_clip: Annotated[float | None, ABOVE_ZERO] = None
    """Bound of the absolute values of queries, keys and values, after their norms and before the rotary
    embedding."""
    scores_divided_by_layer: bool = False
    """Attention scores are divided by the number of their layer, counted from 1."""


class QKVClipFeature(LayerFeature):
    switches = {"qkv_clip": None}
    plain_layers_only = True
    pricing = {"qkv_clip": "numbers"}

    def check(self, config: Any) -> Iterator[str]:
        if config.qkv_clip is not None:
            context = f"with qkv_clip={config.qkv_clip}"
            yield from differing(config, _UNSUPPORTED, context, with_remedy=True)

    def change_model(self, model: nn.Module, config: Any) -> None:
        if config.qkv_clip is None:
            return
        for module in model.modules():
            if isinstance(module, SelfAttention):
                # a bound method and not a closure, so that copies of the model use their own weights
                bounded: Any = MethodType(_make_bounded_tensors, module)
                module.get_query_key_value_tensors = bounded


def _make_bounded_tensors(attention: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return queries, keys and values within ``qkv_clip``, and what else the attention computes."""
    query, key, value, *others = type(attention).get_query_key_value_tensors(
        attention, *args, **kwargs
    )
    bound = attention.config.qkv_clip
    bounded = [tensor.clamp(-bound, bound) for tensor in (query, key, value)]
    return (*bounded, *others)


class ScoresByLayerFeature(LayerFeature):
    switches = {"scores_divided_by_layer": False}
    plain_layers_only = True
    pricing = {"scores_divided_by_layer": "numbers"}

    def check(self, config: Any) -> Iterator[str]:
        if config.scores_divided_by_layer:
            context = "with scores_divided_by_layer=True"
            unsupported = {"multi_latent_attention": False}
            yield from differing(config, unsupported, context, with_remedy=True)

    def change_layer_spec(
        self, spec: ModuleSpec, config: Any, layer_number: int | None, provider: BackendSpecProvider
    ) -> ModuleSpec:
        """Use the attention of the torch backend, whose scale can be changed."""
        return with_torch_attention(spec) if config.scores_divided_by_layer else spec

    def change_model(self, model: nn.Module, config: Any) -> None:
        if not config.scores_divided_by_layer:
            return
        for module in model.modules():
            if isinstance(module, SelfAttention):
                core: Any = module.core_attention
                core.scale /= module.layer_number
