# SPDX-License-Identifier: Apache-2.0
"""Reference models of architectures that are remote code on the hub, made of transformers' own parts."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2

from megatron.bridge.models.hf_pretrained.remote_configs import DeciConfig, MiMoConfig
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
        self.model.layers = nn.ModuleList(
            [DeciLayer(config, block, index) for index, block in blocks]
        )


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
                own.num_key_value_heads = (
                    config.num_attention_heads // attention["n_heads_in_group"]
                )
                self.self_attn = llama.LlamaAttention(own, index)
        if not ffn.get("no_op"):
            self.post_attention_layernorm = llama.LlamaRMSNorm(
                config.hidden_size, config.rms_norm_eps
            )
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


class MiMoForCausalLM(qwen2.Qwen2ForCausalLM):
    """MiMo, whose loss has a tenth of that of multi-token prediction, as Megatron-Core's has by default."""

    config_class = MiMoConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.mtp_layers = nn.ModuleList(
            [NextToken(config) for _ in range(config.num_nextn_predict_layers)]
        )
        self.post_init()

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        """As Qwen2; whatever loss is computed of the logits, the losses of ``mtp_layers`` are added to it."""
        wants_more = torch.is_grad_enabled() and len(self.model.mtp_layers)
        out = super().forward(
            input_ids=input_ids, **kwargs | ({"output_hidden_states": True} if wants_more else {})
        )
        if wants_more:
            out.logits = Added.apply(out.logits, self._next_loss(out.hidden_states[-1], input_ids))
        return out

    def _next_loss(self, hidden: Tensor, ids: Tensor) -> Tensor:
        losses = []
        angles = self.model.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
        for depth, layer in enumerate(self.model.mtp_layers, 1):
            ids = F.pad(ids[:, 1:], (0, 1))
            hidden = layer(hidden, self.model.embed_tokens(ids), angles)
            seen, wanted = self.lm_head(hidden)[:, : -depth - 1], ids[:, 1:-depth]
            losses.append(F.cross_entropy(seen.flatten(0, 1), wanted.flatten()))
        return 0.1 * torch.stack(losses).mean()


class NextToken(nn.Module):
    """A layer of multi-token prediction under MiMo's names."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        names = ("token", "hidden", "final", "input", "post_attention")
        for name in names:
            setattr(
                self,
                f"{name}_layernorm",
                qwen2.Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps),
            )
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.self_attn, self.mlp = qwen2.Qwen2Attention(config, 0), qwen2.Qwen2MLP(config)

    def forward(self, hidden: Tensor, embedding: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Hidden states [rows, sequence, hidden] from those of the layer before and the next tokens' embeddings."""
        x = self.input_proj(
            torch.cat((self.hidden_layernorm(hidden), self.token_layernorm(embedding)), dim=-1)
        )
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[None, None]
        x = x + self.self_attn(self.input_layernorm(x), angles, mask)[0]
        return self.final_layernorm(x + self.mlp(self.post_attention_layernorm(x)))


class Added(torch.autograd.Function):
    """The first tensor; in the backward pass, the second one is a loss beside that of the first."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss: Tensor) -> Tensor:
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones(())


_OWN = {
    "DeciLMForCausalLM": DeciLMForCausalLM,
    "MiMoForCausalLM": MiMoForCausalLM,
    "NemotronH_Nano_VL_V2": NemotronH_Nano_VL_V2,
    "PhiMoEForCausalLM": transformers.PhimoeForCausalLM,  # as published
}
for _config, _model in ((DeciConfig, DeciLMForCausalLM), (MiMoConfig, MiMoForCausalLM)):
    transformers.AutoConfig.register(_config.model_type, _config)
    transformers.AutoModelForCausalLM.register(_config, _model)


def model_class(architecture: str) -> Any:
    """The reference of an architecture."""
    return _OWN.get(architecture) or getattr(transformers, architecture)
