# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention, whose keys an indexer chooses."""

from megatron.bridge.models.conversion.declare.blocks import ends
from megatron.bridge.models.conversion.declare.mla_blocks import indexer, latent_attention, mtp, mtp_copies
from megatron.bridge.models.conversion.declare.mla_fields import (
    INDEXER,
    LATENT,
    NEXT_TOKENS,
    ONLY_SIGMOIDS,
    SPARSE_AFTER_DENSE,
    SPARSE_LIKE,
    UNSPOKEN,
)
from megatron.bridge.models.conversion.declare.moe_blocks import DENSE_OR_SPARSE
from megatron.bridge.models.conversion.declare.moe_fields import GROUPS, ROUTED_AND_SHARED, SIGMOID_ROUTING
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge
from megatron.bridge.models.mla_provider import MLAModelProvider

_LAYER = (latent_attention(), indexer(), *DENSE_OR_SPARSE)


@register_bridge("DeepseekV32ForCausalLM", provider=MLAModelProvider, model_type="deepseek_v32")
class DeepseekV32Bridge(DecoderBridge):
    """Hugging Face's ``DeepseekV32ForCausalLM`` and Megatron's ``GPTModel``."""

    fields = (*LATENT, *INDEXER, *ROUTED_AND_SHARED, *GROUPS, *SPARSE_AFTER_DENSE, NEXT_TOKENS)
    fixed = {**SPARSE_LIKE, **SIGMOID_ROUTING}
    irrelevant = {**UNSPOKEN, **ONLY_SIGMOIDS}
    weights = (ends(), *_LAYER, mtp(*_LAYER))
    copies = mtp_copies()
