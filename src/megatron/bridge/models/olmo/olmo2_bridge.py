# SPDX-License-Identifier: Apache-2.0
"""OLMo 2: norms after attention and MLP instead of before, queries and keys normed over all heads together."""

from megatron.bridge.models.families import *


@register_bridge("Olmo2ForCausalLM", model_type="olmo2")
class Olmo2Bridge(DecoderBridge):
    fields = (*DENSE, ATTENTION_BIAS)
    fixed = {**LLAMA_LIKE, "norm_placement": "post", "qk_norm_across_heads": True, "mlp_bias": False}
    weights = (
        ends(),
        attention(norm=None, qk_norm=True),
        mlp(norm=None),
        post_norms("post_attention_layernorm", "post_feedforward_layernorm"),
    )


@register_bridge("Olmo3ForCausalLM", model_type="olmo3")
class Olmo3Bridge(Olmo2Bridge):
    """OLMo 3: OLMo 2 with windows in three of four layers, a rotary scaling in the others."""

    fields = (*override(Olmo2Bridge.fields, LAYER_ROPE), *WINDOWS)
