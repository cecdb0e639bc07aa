# SPDX-License-Identifier: Apache-2.0
"""MiMo 7B: Qwen2's layers, and one of multi-token prediction that takes the hidden state before the embedding."""

from typing import Any

from megatron.bridge.models.families import (
    NEXT_TOKENS,
    MTPNames,
    attention,
    ends,
    mlp,
    mtp,
    register_bridge,
)
from megatron.bridge.models.qwen.qwen3_bridge import Qwen2Bridge

_LAYER = (attention(), mlp())


def _mtp_names(_config: Any, depth: int) -> MTPNames:
    layer = f"model.mtp_layers.{depth}"
    module_names = (
        f"{layer}.{name}"
        for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    )
    return MTPNames(layer, *module_names, hidden_first=True)


@register_bridge("MiMoForCausalLM", model_type="mimo")
class MiMoBridge(Qwen2Bridge):
    fields = (*Qwen2Bridge.fields, NEXT_TOKENS)
    irrelevant = {**Qwen2Bridge.irrelevant, "attention_bias": (True,)}
    weights = (ends(), *_LAYER, mtp(*_LAYER, names=_mtp_names))
