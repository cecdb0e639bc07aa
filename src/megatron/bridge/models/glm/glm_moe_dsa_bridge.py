# SPDX-License-Identifier: Apache-2.0
"""GLM-5: latent and sparse attention, whose keys an indexer of the layer, or of an earlier one, chooses."""

from megatron.bridge.models.families import *

_LAYER = (latent_attention(), indexer(), *DENSE_OR_SPARSE)


@register_bridge("GlmMoeDsaForCausalLM", provider=MLAModelProvider, model_type="glm_moe_dsa")
class GlmMoeDsaBridge(DecoderBridge):
    fields = (
        *LATENT,
        *INDEXER,
        INDEXERS,
        *ROUTED_AND_SHARED,
        *GROUPS,
        *SPARSE_AFTER_DENSE,
        *(NORM_SIGMOIDS, NEXT_TOKENS),
    )
    fixed = {**SPARSE_LIKE, **SIGMOID_ROUTING, "dsa_indexer_rope_interleaved": True}
    irrelevant = {**UNSPOKEN, **ONLY_SIGMOIDS, "indexer_rope_interleave": (True,)}
    weights = (ends(), *_LAYER, mtp(*_LAYER))
    copies = mtp_copies()
