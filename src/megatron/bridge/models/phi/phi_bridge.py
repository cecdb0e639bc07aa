# SPDX-License-Identifier: Apache-2.0
"""Phi-1, Phi-1.5 and Phi-2: attention and MLP side by side behind one norm, a bias of the output layer."""

from megatron.bridge.models.families import *


@register_bridge("PhiForCausalLM", model_type="phi")
class PhiBridge(DecoderBridge):
    fields = (
        *(field for field in override(DENSE, PARTIAL_ROPE, NORM_EPS) if field.hf != "head_dim"),
        Field("resid_pdrop", "hidden_dropout", default=0.0),
        Field("embd_pdrop", "embedding_dropout", default=0.0),
        Field("qk_layernorm", "qk_layernorm", default=False),
    )
    fixed = {**LAYER_NORM_LIKE, "gated_linear_unit": False, "parallel_residual": "shared_norm", "output_bias": True}
    irrelevant = {"partial_rotary_factor": None}  # transformers copies it into rope_parameters
    weights = (
        ends(norm="model.final_layernorm"),
        attention(output="self_attn.dense", qk_norm="layernorm"),
        mlp(norm=None, gated=False, projections=("", "fc1", "fc2")),
    )
