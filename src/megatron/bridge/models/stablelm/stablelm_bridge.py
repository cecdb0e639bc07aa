# SPDX-License-Identifier: Apache-2.0
"""StableLM 3B, 2-1.6B and 2-12B: LayerNorms, a quarter of each head rotated."""

from megatron.bridge.models.families import (
    DENSE,
    LAYER_NORM_LIKE,
    NORM_EPS,
    PARTIAL_ROPE,
    DecoderBridge,
    Field,
    attention,
    ends,
    head_norms,
    mlp,
    override,
    parallel_residual,
    register_bridge,
)


@register_bridge("StableLmForCausalLM", model_type="stablelm")
class StableLmBridge(DecoderBridge):
    fields = (
        *(field for field in override(DENSE, PARTIAL_ROPE, NORM_EPS) if field.hf != "head_dim"),
        Field("use_qkv_bias", "add_qkv_bias", default=False),
        Field("qk_layernorm", "qk_norm_by_head", default=False),
        parallel_residual("shared_norm", default=False),
    )
    fixed = {**LAYER_NORM_LIKE, "add_bias_linear": False}
    irrelevant = {
        "hidden_dropout": (0.0,),  # transformers would drop out of the feed-forward layers only
        "partial_rotary_factor": None,  # transformers copies it into rope_parameters
    }
    weights = (ends(), attention(), head_norms(), mlp())
