# SPDX-License-Identifier: Apache-2.0
"""Phi-1 to Phi-4."""

from typing import Any

from megatron.bridge.models.families import (
    ATTENTION_BIAS_OF_EXPERTS,
    AUX_LOSS,
    DENSE,
    LAYER_NORM_LIKE,
    LLAMA_LIKE,
    NORM_EPS,
    PARTIAL_ROPE,
    SOFTMAX_ROUTING,
    WINDOW,
    DecoderBridge,
    Field,
    attention,
    constant,
    ends,
    expert_sizes,
    experts,
    mlp,
    override,
    register_bridge,
    router,
)


@register_bridge("PhiForCausalLM", model_type="phi")
class PhiBridge(DecoderBridge):
    """Phi-1, Phi-1.5 and Phi-2: attention and MLP side by side behind one norm, a bias of the output layer."""

    fields = (
        *(field for field in override(DENSE, PARTIAL_ROPE, NORM_EPS) if field.hf != "head_dim"),
        Field("resid_pdrop", "hidden_dropout", default=0.0),
        Field("embd_pdrop", "embedding_dropout", default=0.0),
        Field("qk_layernorm", "qk_layernorm", default=False),
    )
    fixed = {
        **LAYER_NORM_LIKE,
        "gated_linear_unit": False,
        "parallel_residual": "shared_norm",
        "output_bias": True,
    }
    irrelevant = {"partial_rotary_factor": None}  # transformers copies it into rope_parameters
    weights = (
        ends(norm="model.final_layernorm"),
        attention(output="self_attn.dense", qk_norm="layernorm"),
        mlp(norm=None, gated=False, projections=("", "fc1", "fc2")),
    )


def _trained_length(_: Any, provider: Any) -> int:
    scaling: dict[str, Any] = provider.rope_parameters or {}
    return scaling.get("original_max_position_embeddings", provider.max_position_embeddings)


TRAINED_LENGTH = Field("original_max_position_embeddings", (), default=None, back=_trained_length)
"""A copy of what ``rope_parameters`` has, which transformers takes first."""


@register_bridge("Phi3ForCausalLM", model_type="phi3")
class Phi3Bridge(DecoderBridge):
    """Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: queries, keys and values in one tensor, gate and up in another."""

    fields = (*override(DENSE, PARTIAL_ROPE), WINDOW, TRAINED_LENGTH)
    fixed = {**LLAMA_LIKE, "add_bias_linear": False}
    irrelevant = {
        "resid_pdrop": (0.0,),
        "embd_pdrop": (0.0,),
        "partial_rotary_factor": None,  # transformers copies it into rope_parameters
        # what else Phi's own code can do, and no published model does
        **dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias"), (False,)),
        **dict.fromkeys(("full_attn_mod", "interpolate_factor"), (1,)),
    }
    weights = (ends(), attention(fused=True), mlp(fused=True))


_COUNT, _, _WIDTH = expert_sizes("num_local_experts", "intermediate_size")


@register_bridge("PhimoeForCausalLM", model_type="phimoe")
class PhimoeBridge(DecoderBridge):
    """Phi-3.5-MoE: Mixtral's decoder with LayerNorms, biases, and SparseMixer routing to two experts.

    Texts longer than ``original_max_position_embeddings`` are rotated with ``long_factor``, as in the published code;
    transformers takes ``short_factor`` for them.
    """

    fields = (
        *DENSE,
        WINDOW,
        TRAINED_LENGTH,
        _COUNT,
        _WIDTH,
        constant("num_experts_per_tok", 2),  # transformers reads no other
        ATTENTION_BIAS_OF_EXPERTS,
        Field("lm_head_bias", "output_bias", default=False),
        Field("router_jitter_noise", "moe_router_sparsemixer_eps", default=0.01),
        AUX_LOSS,
    )
    fixed = {**LAYER_NORM_LIKE, **SOFTMAX_ROUTING, "moe_router_topk": 2, "add_bias_linear": False}
    # the noise is of transformers' training; Megatron-Core adds its own in evaluation, too
    irrelevant = {"input_jitter_noise": None, "hidden_dropout": (0.0,)}
    weights = (
        ends(),
        attention(),
        router("block_sparse_moe.gate", norm="post_attention_layernorm"),
        experts("block_sparse_moe.experts.*", gate="w1", up="w3", down="w2"),
    )
