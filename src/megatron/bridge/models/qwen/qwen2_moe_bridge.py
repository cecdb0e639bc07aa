# SPDX-License-Identifier: Apache-2.0
"""Qwen1.5-MoE and Qwen2-57B-A14B: routed experts beside a gated shared one, dense layers among the sparse."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.bridge.models.conversion.blocks import attention, ends, mlp
from megatron.bridge.models.conversion.decoder_fields import DENSE, LAYER_TYPES, LLAMA_LIKE, WINDOW
from megatron.bridge.models.conversion.expert_blocks import experts, router, shared_experts
from megatron.bridge.models.conversion.expert_fields import (
    AUX_LOSS,
    DENSE_AMONG_SPARSE,
    NORM_TOPK,
    SOFTMAX_ROUTING,
)
from megatron.bridge.models.conversion.expert_fields import experts as expert_sizes
from megatron.bridge.models.conversion.fields import Field
from megatron.bridge.models.conversion.model_bridge import DecoderBridge, register_bridge


def _window(width: Any, config: Mapping[str, Any]) -> Any:
    assert WINDOW.to
    return WINDOW.to(width or None, config)  # here, 0 is no window


def _window_back(window: Any, provider: Any) -> Any:
    assert WINDOW.back
    return WINDOW.back(window, provider) or 0


@register_bridge("Qwen2MoeForCausalLM", model_type="qwen2_moe")
class Qwen2MoeBridge(DecoderBridge):
    """Hugging Face's ``Qwen2MoeForCausalLM`` and Megatron's ``GPTModel``."""

    fields = (
        *DENSE,
        replace(WINDOW, to=_window, back=_window_back),
        LAYER_TYPES,
        *expert_sizes(),
        *DENSE_AMONG_SPARSE,
        NORM_TOPK,
        AUX_LOSS,
        Field("qkv_bias", "add_qkv_bias", default=True),
        Field("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    )
    fixed = {**LLAMA_LIKE, **SOFTMAX_ROUTING, "add_bias_linear": False, "moe_shared_expert_gate": True}
    irrelevant = {"output_router_logits": None, "use_sliding_window": None, "max_window_layers": None}
    weights = (
        ends(),
        attention(),
        mlp(),
        router(),
        experts(),
        shared_experts("mlp.shared_expert", gate="mlp.shared_expert_gate"),
    )
