# SPDX-License-Identifier: Apache-2.0
"""Llama 4's decoder: chunks of attention, layers without rotary embedding, one expert for each token."""

from megatron.bridge.models.families import *


@register_bridge("Llama4ForCausalLM", model_type="llama4_text")
class Llama4Bridge(DecoderBridge):
    fields = (
        *(field for field in DENSE if field.hf != "intermediate_size"),
        *LISTED_EXPERTS,
        *CHUNKS,
        *QUERY_GROWTH,
        NO_ROPE_LAYERS,
        ATTENTION_BIAS_OF_EXPERTS,
        AUX_LOSS,
        Field("use_qk_norm", "qk_l2_norm", default=True),
    )
    fixed = {
        **LLAMA_LIKE,
        **DROPLESS,
        "rotary_interleaved": True,
        "add_bias_linear": False,
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_apply_probs_on_input": True,
    }
    # what transformers makes lists of layers from, which it always fills in; and what it does not read
    irrelevant = {
        **dict.fromkeys(("interleave_moe_layer_step", "no_rope_layer_interval")),
        **dict.fromkeys(("output_router_logits", "router_jitter_noise", "for_llm_compressor")),
    }
    weights = (
        ends(),
        attention(),
        mlp(names="feed_forward"),
        router("feed_forward.router"),
        stacked_experts("feed_forward.experts", turned=True),
        shared_experts("feed_forward.shared_expert"),
    )
