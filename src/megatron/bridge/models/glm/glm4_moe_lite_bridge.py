# SPDX-License-Identifier: Apache-2.0
"""GLM-4.7-Flash: latent attention, sigmoid routing, multi-token prediction."""

from megatron.bridge.models.conversion.declare.blocks import ends
from megatron.bridge.models.conversion.declare.mla_blocks import latent_attention, mtp, mtp_copies
from megatron.bridge.models.conversion.declare.mla_fields import (
    LATENT,
    LATENT_LIKE,
    NEXT_TOKENS,
    ONLY_SIGMOIDS,
    SPARSE_LAYERS,
    UNSPOKEN,
)
from megatron.bridge.models.conversion.declare.moe_blocks import DENSE_OR_SPARSE
from megatron.bridge.models.conversion.declare.moe_fields import GROUPS, ROUTED_AND_SHARED, SIGMOID_ROUTING
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge
from megatron.bridge.models.mla_provider import MLAModelProvider

_LAYER = (latent_attention(), *DENSE_OR_SPARSE)


@register_bridge("Glm4MoeLiteForCausalLM", provider=MLAModelProvider, model_type="glm4_moe_lite")
class Glm4MoeLiteBridge(DecoderBridge):
    fields = (*LATENT, *ROUTED_AND_SHARED, *GROUPS, SPARSE_LAYERS, NEXT_TOKENS)
    fixed = {**LATENT_LIKE, **SIGMOID_ROUTING}
    irrelevant = {
        **UNSPOKEN,
        "first_k_dense_replace": None,  # checked by SPARSE_LAYERS
        **ONLY_SIGMOIDS,
    }
    weights = (ends(), *_LAYER, mtp(*_LAYER))
    copies = mtp_copies()
