# SPDX-License-Identifier: Apache-2.0
"""Reference models of architectures that are remote code on the hub, made of transformers' own parts."""

import copy
from typing import Any

import transformers
from torch import Tensor, nn
from transformers.models.llama import modeling_llama as llama

from megatron.bridge.models.hf_pretrained.deci_config import DeciConfig
from tests.families.nano_vl import NemotronH_Nano_VL_V2


class DeciLMForCausalLM(llama.LlamaForCausalLM):
    """Llama-Nemotron, as its config describes it."""

    config_class = DeciConfig

    def __init__(self, config: Any) -> None:
        without_layers = copy.deepcopy(config)
        without_layers.num_hidden_layers = 0
        super().__init__(without_layers)
        self.config = self.model.config = config
        blocks = enumerate(config.block_configs)
        self.model.layers = nn.ModuleList([DeciLayer(config, block, index) for index, block in blocks])


class DeciLayer(nn.Module):
    """Llama's attention and feed-forward layer, each in its own size, as one linear layer, or left out."""

    def __init__(self, config: Any, block: dict[str, Any], index: int) -> None:
        super().__init__()
        own, attention, ffn = copy.deepcopy(config), block["attention"], block["ffn"]
        if not attention.get("no_op"):
            self.input_layernorm = llama.LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            if attention.get("replace_with_linear"):
                self.self_attn = One("linear_attn", config.hidden_size)
            else:
                own.num_key_value_heads = config.num_attention_heads // attention["n_heads_in_group"]
                self.self_attn = llama.LlamaAttention(own, index)
        if not ffn.get("no_op"):
            self.post_attention_layernorm = llama.LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            if ffn.get("replace_with_linear"):
                self.mlp = One("linear_mlp", config.hidden_size)
            else:
                width = int(2 * ffn["ffn_mult"] * config.hidden_size / 3)
                own.intermediate_size = -(-width // 256) * 256
                self.mlp = llama.LlamaMLP(own)

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        """The residual stream [rows, sequence, hidden] behind the layer."""
        if hasattr(self, "self_attn"):
            x = x + self.self_attn(hidden_states=self.input_layernorm(x), **context)[0]
        if hasattr(self, "mlp"):
            out = self.mlp(self.post_attention_layernorm(x))
            x = x + (out[0] if isinstance(self.mlp, One) else out)
        return x


class One(nn.Module):
    """A linear layer with a name, called as attention is."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        setattr(self, name, nn.Linear(width, width, bias=False))

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Its output, and no weights of attention."""
        (linear,) = self.children()
        return linear(hidden_states), None


_OWN = {"DeciLMForCausalLM": DeciLMForCausalLM, "NemotronH_Nano_VL_V2": NemotronH_Nano_VL_V2}
transformers.AutoConfig.register("nemotron-nas", DeciConfig)
transformers.AutoModelForCausalLM.register(DeciConfig, DeciLMForCausalLM)


def model_class(architecture: str) -> Any:
    """The reference of an architecture."""
    return _OWN.get(architecture) or getattr(transformers, architecture)
