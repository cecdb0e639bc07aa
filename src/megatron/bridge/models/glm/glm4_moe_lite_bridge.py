# SPDX-License-Identifier: Apache-2.0
"""GLM-4.7-Flash: latent attention, sigmoid routing, multi-token prediction."""

from megatron.bridge.models.families import *

_LAYER = (latent_attention(), *DENSE_OR_SPARSE)


@register_bridge("Glm4MoeLiteForCausalLM", provider=MLAModelProvider, model_type="glm4_moe_lite")
class Glm4MoeLiteBridge(DecoderBridge):
    fields = (*(*LATENT, *ROUTED_AND_SHARED, *GROUPS), *(NORM_SIGMOIDS, SPARSE_LAYERS, NEXT_TOKENS))
    fixed = {**LATENT_LIKE, **SIGMOID_ROUTING}
    irrelevant = {
        **UNSPOKEN,
        "first_k_dense_replace": None,  # checked by SPARSE_LAYERS
        **ONLY_SIGMOIDS,
    }
    weights = (ends(), *_LAYER, mtp(*_LAYER))
    copies = mtp_copies()
