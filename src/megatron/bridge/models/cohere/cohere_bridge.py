# SPDX-License-Identifier: Apache-2.0
"""Command R and R+: attention and MLP side by side behind one norm without a bias."""

from megatron.bridge.models.families import (
    ATTENTION_BIAS,
    DENSE,
    LAYER_NORM_LIKE,
    LOGIT_SCALE,
    NORM_EPS,
    WINDOW,
    WINDOWED_ROPE,
    DecoderBridge,
    Field,
    attention,
    ends,
    mlp,
    override,
    register_bridge,
)


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


@register_bridge("Cohere2ForCausalLM", model_type="cohere2")
class Cohere2Bridge(CohereBridge):
    """Command R7B and A: Command R with windows; only layers with a window have a rotary embedding."""

    fields = (
        *(field for field in CohereBridge.fields if field.hf != "use_qk_norm"),
        WINDOW,
        WINDOWED_ROPE,
    )
    # published configs have them; transformers reads none, but makes layer_types of sliding_window_pattern
    irrelevant = {
        **dict.fromkeys(
            ("use_parallel_block", "use_embedding_sharing", "use_gated_activation"), (True,)
        ),
        **dict.fromkeys(
            ("rotary_pct", "order_of_interleaved_layers", "layer_switch", "position_embedding_type")
        ),
        **dict.fromkeys(
            ("sliding_window_pattern", "_sliding_window_pattern", "use_parallel_embedding")
        ),
        "use_qk_norm": (False,),
    }
