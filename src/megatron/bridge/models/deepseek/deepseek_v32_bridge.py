# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention, whose keys an indexer chooses."""

from megatron.bridge.models.families import *

_LAYER = (latent_attention(), indexer(), *DENSE_OR_SPARSE)


@register_bridge("DeepseekV32ForCausalLM", provider=MLAModelProvider, model_type="deepseek_v32")
class DeepseekV32Bridge(DecoderBridge):
    fields = (*(*LATENT, *INDEXER, *ROUTED_AND_SHARED, *GROUPS, *SPARSE_AFTER_DENSE), *(NORM_SIGMOIDS, NEXT_TOKENS))
    fixed = {**SPARSE_LIKE, **SIGMOID_ROUTING}
    irrelevant = {**UNSPOKEN, **ONLY_SIGMOIDS}
    weights = (ends(), *_LAYER, mtp(*_LAYER))
    copies = mtp_copies()
