# SPDX-License-Identifier: Apache-2.0
"""All layer features. A new one is a module beside this one, and two rows here: its fields, and itself."""

from dataclasses import dataclass
from typing import Any

from megatron.bridge.models.features.activations import XIELUFeature
from megatron.bridge.models.features.alibi import ALiBiFeature, ALiBiFields
from megatron.bridge.models.features.attention_scores import (
    AttentionScoreFields,
    QKVClipFeature,
    ScoresByLayerFeature,
)
from megatron.bridge.models.features.biases import BiasFeature, BiasFields
from megatron.bridge.models.features.experts_beside_mlp import (
    ExpertsBesideMLPFeature,
    ExpertsBesideMLPFields,
)
from megatron.bridge.models.features.feature import LayerFeature
from megatron.bridge.models.features.gated_delta_net import GatedDeltaNetFeature
from megatron.bridge.models.features.heads import HeadFeature, HeadFields
from megatron.bridge.models.features.host_activations import HostActivationsFeature
from megatron.bridge.models.features.kimi_delta import KimiDeltaFeature, KimiDeltaFields
from megatron.bridge.models.features.kv_sharing import KVSharingFeature, KVSharingFields
from megatron.bridge.models.features.latent_experts import LatentExpertsFeature
from megatron.bridge.models.features.layer_scales import LayerScaleFeature, LayerScaleFields
from megatron.bridge.models.features.mamba_beside_attention import (
    MambaBesideAttentionFeature,
    MambaBesideAttentionFields,
)
from megatron.bridge.models.features.mamba_layers import MambaFeature, MambaFields
from megatron.bridge.models.features.multi_token_prediction import MultiTokenPredictionFeature
from megatron.bridge.models.features.multipliers import (
    MultiplierFeature,
    MultiplierFields,
    QueryScalingFeature,
)
from megatron.bridge.models.features.padding import HeadPaddingFields, PaddingFeature
from megatron.bridge.models.features.padding_token import PaddingTokenFeature, PaddingTokenFields
from megatron.bridge.models.features.per_layer_inputs import (
    PerLayerInputFeature,
    PerLayerInputFields,
)
from megatron.bridge.models.features.quantization_aware import (
    QuantizationAwareFeature,
    QuantizationAwareFields,
)
from megatron.bridge.models.features.routing import RoutingFeature, RoutingFields
from megatron.bridge.models.features.short_conv import ShortConvFeature, ShortConvFields
from megatron.bridge.models.features.sinks import SinkFeature
from megatron.bridge.models.features.sparse_attention import SparseAttentionFeature


@dataclass
class FeatureFields(
    ALiBiFields,
    AttentionScoreFields,
    HeadFields,
    HeadPaddingFields,
    MambaBesideAttentionFields,
    KimiDeltaFields,
    MambaFields,
    ShortConvFields,
    RoutingFields,
    BiasFields,
    MultiplierFields,
    PaddingTokenFields,
    ExpertsBesideMLPFields,
    LayerScaleFields,
    PerLayerInputFields,
    KVSharingFields,
    QuantizationAwareFields,
):
    """The settings of all features. A dataclass has the fields of its last base first, and so has a YAML file."""


FEATURES: list[LayerFeature] = [
    SinkFeature(),
    KVSharingFeature(),
    QueryScalingFeature(),
    ALiBiFeature(),
    QKVClipFeature(),
    ScoresByLayerFeature(),
    BiasFeature(),
    RoutingFeature(),
    XIELUFeature(),
    MultiplierFeature(),
    ShortConvFeature(),
    MambaFeature(),
    KimiDeltaFeature(),
    MambaBesideAttentionFeature(),
    GatedDeltaNetFeature(),
    SparseAttentionFeature(),
    MultiTokenPredictionFeature(),
    LatentExpertsFeature(),
    ExpertsBesideMLPFeature(),
    PerLayerInputFeature(),
    LayerScaleFeature(),  # after what layers add at their end
    PaddingFeature(),  # hides logits of padding after they were scaled
    PaddingTokenFeature(),
    HostActivationsFeature(),
    QuantizationAwareFeature(),
    HeadFeature(),  # replaces the output layer with all that was added to it
]
"""All features, in the order in which they change layer specs and models."""


def feature_of(kind: type) -> LayerFeature | None:
    """Return the feature that counts the costs of modules of class ``kind``, if there is one."""
    return next((feature for feature in FEATURES if issubclass(kind, feature.modules)), None)


def plain_layer_values() -> dict[str, Any]:
    """Return the switches of features that are for plain decoders only, and their values without the features."""
    plain = [feature for feature in FEATURES if feature.plain_layers_only]
    return {name: off for feature in plain for name, off in feature.switches.items()}
