# SPDX-License-Identifier: Apache-2.0
"""Phi-3.5-MoE: Mixtral's decoder with LayerNorms, biases, and SparseMixer routing to two experts.

Texts longer than ``original_max_position_embeddings`` are rotated with ``long_factor``, as in the published code;
transformers takes ``short_factor`` for them.
"""

from megatron.bridge.models.families import *
from megatron.bridge.models.phi.phi3_bridge import TRAINED_LENGTH

_COUNT, _, _WIDTH = expert_sizes("num_local_experts", "intermediate_size")


@register_bridge("PhimoeForCausalLM", model_type="phimoe")
class PhimoeBridge(DecoderBridge):
    fields = (
        *DENSE,
        WINDOW,
        TRAINED_LENGTH,
        *(_COUNT, _WIDTH),
        constant("num_experts_per_tok", 2),  # transformers reads no other
        ATTENTION_BIAS_OF_EXPERTS,
        Field("lm_head_bias", "output_bias", default=False),
        Field("router_jitter_noise", "moe_router_sparsemixer_eps", default=0.01),
        AUX_LOSS,
    )
    fixed = {**LAYER_NORM_LIKE, **SOFTMAX_ROUTING, "moe_router_topk": 2, "add_bias_linear": False}
    # the noise is of transformers' training; Megatron-Core adds its own in evaluation, too
    irrelevant = {"output_router_logits": None, "input_jitter_noise": None, "hidden_dropout": (0.0,)}
    weights = (
        ends(),
        attention(),
        router("block_sparse_moe.gate", norm="post_attention_layernorm"),
        experts("block_sparse_moe.experts.*", gate="w1", up="w3", down="w2"),
    )
