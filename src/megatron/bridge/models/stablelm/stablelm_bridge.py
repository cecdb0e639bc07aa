# SPDX-License-Identifier: Apache-2.0
"""StableLM 3B, 2-1.6B and 2-12B: LayerNorms, a quarter of each head rotated."""

from typing import Any

from megatron.bridge.models.conversion.mappings.head_gains import HeadGainsMapping
from megatron.bridge.models.families import (
    DENSE,
    LAYER_NORM_LIKE,
    NORM_EPS,
    PARTIAL_ROPE,
    Block,
    DecoderBridge,
    Field,
    attention,
    ends,
    mlp,
    override,
    parallel_residual,
    register_bridge,
)


def _head_norms(config: Any) -> Block:
    """Return the norms of queries and keys, which Hugging Face stores head by head."""
    heads, groups = config.unpadded_heads
    return tuple(
        HeadGainsMapping(
            f"decoder.layers.*.self_attention.{norm}.weight",
            {
                str(head): f"model.layers.*.self_attn.{norm}.norms.{head}.weight"
                for head in range(count)
            },
        )
        for norm, count in (("q_layernorm", heads), ("k_layernorm", groups))
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
    weights = (ends(), attention(), _head_norms, mlp())
