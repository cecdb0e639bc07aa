# SPDX-License-Identifier: Apache-2.0
"""GLM-4.7-Flash: latent attention, sigmoid routing, multi-token prediction."""

from megatron.bridge.models.conversion.declare import mla_fields as mla
from megatron.bridge.models.conversion.declare import moe_fields as moe
from megatron.bridge.models.conversion.declare.blocks import ends
from megatron.bridge.models.conversion.declare.mla_blocks import latent_attention, mtp, mtp_copies
from megatron.bridge.models.conversion.declare.moe_blocks import DENSE_OR_SPARSE
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge
from megatron.bridge.models.mla_provider import MLAModelProvider

_LAYER = (latent_attention(), *DENSE_OR_SPARSE)


@register_bridge("Glm4MoeLiteForCausalLM", provider=MLAModelProvider, model_type="glm4_moe_lite")
class Glm4MoeLiteBridge(DecoderBridge):
    fields = (
        *(*mla.LATENT, *moe.ROUTED_AND_SHARED, *moe.GROUPS),
        *(moe.NORM_SIGMOIDS, mla.SPARSE_LAYERS, mla.NEXT_TOKENS),
    )
    fixed = {**mla.LATENT_LIKE, **moe.SIGMOID_ROUTING}
    irrelevant = {
        **mla.UNSPOKEN,
        "first_k_dense_replace": None,  # checked by SPARSE_LAYERS
        **mla.ONLY_SIGMOIDS,
    }
    weights = (ends(), *_LAYER, mtp(*_LAYER))
    copies = mtp_copies()
