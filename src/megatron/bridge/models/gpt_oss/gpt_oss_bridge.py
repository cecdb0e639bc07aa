# SPDX-License-Identifier: Apache-2.0
"""gpt-oss: attention sinks, alternating windows, experts with biases behind a clamped, shifted gate."""

from megatron.core.fusions import fused_bias_geglu

from megatron.bridge.models.families import (
    AUX_LOSS,
    DENSE,
    LLAMA_LIKE,
    SOFTMAX_ROUTING,
    WINDOWS,
    AutoMapping,
    Block,
    DecoderBridge,
    Field,
    InterleavedGatedMLPMapping,
    attention,
    ends,
    expert_names,
    expert_sizes,
    register_bridge,
    router,
)

_SINKS = "decoder.layers.*.self_attention.core_attention.softmax_offset"
_EXPERTS = "model.layers.*.mlp.experts"


def _expert_mappings(kind: str, suffix: str) -> Block:
    """Weights [experts, in, out], or biases [experts, out]; gate and up alternate."""
    fc1, fc2 = (expert_names(linear, kind) for linear in ("linear_fc1", "linear_fc2"))
    turned = kind == "weight"
    return (
        *(
            InterleavedGatedMLPMapping(name, f"{_EXPERTS}.gate_up_proj{suffix}").stacked(turned)
            for name in fc1
        ),
        *(AutoMapping(name, f"{_EXPERTS}.down_proj{suffix}").stacked(turned) for name in fc2),
    )


@register_bridge("GptOssForCausalLM", model_type="gpt_oss")
class GptOssBridge(DecoderBridge):
    fields = (
        *(field for field in DENSE if field.hf not in ("hidden_act", "intermediate_size")),
        *WINDOWS,
        *expert_sizes("num_local_experts", "intermediate_size"),
        AUX_LOSS,
        Field("attention_bias", "attention_bias", default=True),
        Field("swiglu_limit", "activation_func_clamp_value", default=7.0),
    )
    fixed = {
        **LLAMA_LIKE,
        **SOFTMAX_ROUTING,
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "activation_func": fused_bias_geglu.quick_gelu,
        "glu_linear_offset": 1.0,
    }
    irrelevant = {
        "hidden_act": ("silu",),  # the gate is always x * sigmoid(1.702 x)
        "swiglu_alpha": (1.702,),
        # copies of num_experts_per_tok and of rope_parameters' original length, which transformers does not read
        "experts_per_token": None,
        "initial_context_length": None,
    }
    weights = (
        ends(),
        attention(),
        (AutoMapping(_SINKS, "model.layers.*.self_attn.sinks"),),
        router("mlp.router", norm="post_attention_layernorm"),
        _expert_mappings("weight", ""),
        _expert_mappings("bias", "_bias"),
    )


GPTOSSBridge = GptOssBridge
