# SPDX-License-Identifier: Apache-2.0
"""Command R and R+: attention and MLP side by side behind one norm without a bias."""

from megatron.bridge.models.families import *


@register_bridge("CohereForCausalLM", model_type="cohere")
class CohereBridge(DecoderBridge):
    fields = (
        *override(DENSE, NORM_EPS),
        ATTENTION_BIAS,
        LOGIT_SCALE,
        Field("use_qk_norm", "qk_norm_by_head", default=False),
    )
    fixed = {
        **LAYER_NORM_LIKE,
        "layernorm_bias": False,
        "parallel_residual": "shared_norm",
        "rotary_interleaved": True,
        "mlp_bias": False,
    }
    irrelevant = {"model_max_length": None}
    weights = (ends(), attention(qk_norm=True), mlp(norm=None))
