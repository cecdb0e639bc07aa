# SPDX-License-Identifier: Apache-2.0
"""Apertus: no gate, but an activation whose parameters are trained (xIELU); queries and keys normalized."""

from megatron.bridge.models.families import (
    ATTENTION_BIAS,
    DENSE,
    LLAMA_LIKE,
    DecoderBridge,
    ReplicatedMapping,
    attention,
    constant,
    ends,
    mlp,
    register_bridge,
)
from megatron.bridge.models.features.activations import xielu

_ACTIVATION = tuple(
    ReplicatedMapping(
        f"decoder.layers.*.mlp.activation_func.{name}", f"model.layers.*.mlp.act_fn.{name}"
    )
    for name in ("alpha_p", "alpha_n", "beta", "eps")
)


@register_bridge("ApertusForCausalLM", model_type="apertus")
class ApertusBridge(DecoderBridge):
    fields = (
        *(field for field in DENSE if field.hf != "hidden_act"),
        constant("hidden_act", "xielu"),
        ATTENTION_BIAS,
    )
    fixed = {
        **LLAMA_LIKE,
        "gated_linear_unit": False,
        "activation_func": xielu,
        "qk_layernorm": True,
        "mlp_bias": False,
    }
    irrelevant = {"mlp_bias": (False,), "post_norm": (False,), "qk_norm": (True,)}
    weights = (
        ends(),
        attention(norm="attention_layernorm", qk_norm=True),
        mlp(norm="feedforward_layernorm", gated=False),
        _ACTIVATION,
    )
