# SPDX-License-Identifier: Apache-2.0
"""StarCoder2: LayerNorms and biases everywhere, a window in 3B and 7B."""

from dataclasses import replace

from megatron.bridge.models.families import (
    ALL_BIASES,
    DENSE,
    LAYER_NORM_LIKE,
    WINDOW,
    DecoderBridge,
    Field,
    attention,
    ends,
    mlp,
    override,
    register_bridge,
)


@register_bridge("Starcoder2ForCausalLM", model_type="starcoder2")
class Starcoder2Bridge(DecoderBridge):
    fields = (
        *override(DENSE, Field("norm_epsilon", "layernorm_epsilon", default=1e-5)),
        replace(ALL_BIASES, default=True),
        WINDOW,
        Field("residual_dropout", "hidden_dropout", default=0.0),
        Field("embedding_dropout", "embedding_dropout", default=0.0),
    )
    fixed = {**LAYER_NORM_LIKE, "gated_linear_unit": False}
    # of the training code that the first configs tell of
    irrelevant = {"mlp_type": ("default",), "norm_type": ("layer_norm",)}
    weights = (ends(), attention(), mlp(gated=False, projections=("", "c_fc", "c_proj")))
