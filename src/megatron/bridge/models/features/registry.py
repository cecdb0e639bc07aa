# SPDX-License-Identifier: Apache-2.0
"""All layer features. A new one is a module beside this one, and two rows here: its fields, and itself."""

from dataclasses import dataclass
from typing import Any

from megatron.bridge.models.features.activations import TrainedXIELU
from megatron.bridge.models.features.biases import BiasFields, PartialBiases
from megatron.bridge.models.features.experts_beside_mlp import (
    DenseLayerBesideExperts,
    ExpertsBesideMLPFields,
)
from megatron.bridge.models.features.feature import LayerFeature
from megatron.bridge.models.features.gated_delta_net import GatedDeltaNets
from megatron.bridge.models.features.heads import HeadFields, Heads
from megatron.bridge.models.features.kimi_delta import KimiDelta, KimiDeltaFields
from megatron.bridge.models.features.kv_sharing import KVSharing, KVSharingFields
from megatron.bridge.models.features.latent_experts import ExpertsOfLatents
from megatron.bridge.models.features.layer_scales import LayerScaleFields, LayerScales
from megatron.bridge.models.features.mamba_beside_attention import (
    MambaBesideAttention,
    MambaBesideAttentionFields,
)
from megatron.bridge.models.features.mamba_layers import MambaFields, MambaLayers
from megatron.bridge.models.features.multi_token_prediction import MultiTokenPrediction
from megatron.bridge.models.features.multipliers import (
    MultiplierFields,
    Multipliers,
    QueryScaling,
)
from megatron.bridge.models.features.padding import HeadPaddingFields, Padding
from megatron.bridge.models.features.per_layer_inputs import (
    PerLayerEmbeddings,
    PerLayerInputFields,
)
from megatron.bridge.models.features.routing import RoutingFields, RoutingRules
from megatron.bridge.models.features.short_conv import ShortConvFields, ShortConvolutions
from megatron.bridge.models.features.sinks import AttentionSinks
from megatron.bridge.models.features.sparse_attention import ChosenKeys


@dataclass
class FeatureFields(
    HeadFields,
    HeadPaddingFields,
    MambaBesideAttentionFields,
    KimiDeltaFields,
    MambaFields,
    ShortConvFields,
    RoutingFields,
    BiasFields,
    MultiplierFields,
    ExpertsBesideMLPFields,
    LayerScaleFields,
    PerLayerInputFields,
    KVSharingFields,
):
    """The settings of all features. A dataclass has the fields of its last base first, and so has a YAML file."""


FEATURES: list[LayerFeature] = [
    AttentionSinks(),
    KVSharing(),
    QueryScaling(),
    PartialBiases(),
    RoutingRules(),
    TrainedXIELU(),
    Multipliers(),
    ShortConvolutions(),
    MambaLayers(),
    KimiDelta(),
    MambaBesideAttention(),
    GatedDeltaNets(),
    ChosenKeys(),
    MultiTokenPrediction(),
    ExpertsOfLatents(),
    DenseLayerBesideExperts(),
    PerLayerEmbeddings(),
    LayerScales(),  # after what layers add at their end
    Padding(),  # hides logits of padding after they were scaled
    Heads(),  # replaces the output layer with all that was added to it
]
"""All features, in the order in which they change layer specs and models."""


def feature_of(kind: type) -> LayerFeature | None:
    """Return the feature that counts the costs of modules of class ``kind``, if there is one."""
    return next((feature for feature in FEATURES if issubclass(kind, feature.modules)), None)


def plain_layer_values() -> dict[str, Any]:
    """Return the switches of features that are for plain decoders only, and their values without the features."""
    plain = [feature for feature in FEATURES if feature.plain_layers_only]
    return {name: off for feature in plain for name, off in feature.switches.items()}
