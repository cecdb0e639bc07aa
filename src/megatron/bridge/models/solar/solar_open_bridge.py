# SPDX-License-Identifier: Apache-2.0
"""Solar Open 100B: GLM-4.5's routed and shared experts in every layer."""

from megatron.bridge.models.families import (
    DENSE,
    GROUPS,
    LLAMA_LIKE,
    NORM_SIGMOIDS,
    ROUTED_AND_SHARED,
    SIGMOID_ROUTING,
    DecoderBridge,
    Field,
    attention,
    ends,
    experts,
    register_bridge,
    router,
    shared_experts,
)


@register_bridge("SolarOpenForCausalLM", model_type="solar_open")
class SolarOpenBridge(DecoderBridge):
    fields = (
        *(field for field in DENSE if field.hf != "intermediate_size"),
        *ROUTED_AND_SHARED,
        *GROUPS,
        NORM_SIGMOIDS,
        Field("attention_bias", "add_qkv_bias", default=False),
    )
    fixed = {**LLAMA_LIKE, **SIGMOID_ROUTING, "add_bias_linear": False}
    # of published configs; no layer is dense, and transformers has no norm of queries and no next-token layer
    irrelevant = {
        "intermediate_size": None,
        "first_k_dense_replace": (0,),
        "use_qk_norm": (False,),
        "num_nextn_predict_layers": (0,),
        "partial_rotary_factor": (1.0,),
    }
    weights = (
        ends(),
        attention(),
        router(norm="post_attention_layernorm"),
        experts(),
        shared_experts(),
    )
