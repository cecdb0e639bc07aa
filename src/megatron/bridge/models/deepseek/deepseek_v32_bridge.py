# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention, whose keys an indexer chooses."""

from megatron.bridge.models.conversion.declare import mla_fields as mla
from megatron.bridge.models.conversion.declare import moe_fields as moe
from megatron.bridge.models.conversion.declare.blocks import ends
from megatron.bridge.models.conversion.declare.mla_blocks import indexer, latent_attention, mtp, mtp_copies
from megatron.bridge.models.conversion.declare.moe_blocks import DENSE_OR_SPARSE
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge
from megatron.bridge.models.mla_provider import MLAModelProvider

_LAYER = (latent_attention(), indexer(), *DENSE_OR_SPARSE)


@register_bridge("DeepseekV32ForCausalLM", provider=MLAModelProvider, model_type="deepseek_v32")
class DeepseekV32Bridge(DecoderBridge):
    fields = (
        *(*mla.LATENT, *mla.INDEXER, *moe.ROUTED_AND_SHARED, *moe.GROUPS, *mla.SPARSE_AFTER_DENSE),
        *(moe.NORM_SIGMOIDS, mla.NEXT_TOKENS),
    )
    fixed = {**mla.SPARSE_LIKE, **moe.SIGMOID_ROUTING}
    irrelevant = {**mla.UNSPOKEN, **mla.ONLY_SIGMOIDS}
    weights = (ends(), *_LAYER, mtp(*_LAYER))
    copies = mtp_copies()
