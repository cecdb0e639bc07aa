# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next's layer of multi-token prediction, which transformers leaves out, made of its own parts.

The embedding of the next token and the hidden state of this one are normed and projected together, the embedding
first; then come a layer of the decoder with attention, a final norm and the model's own output layer.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextDecoderLayer,
    Qwen3NextRMSNorm,
)

from tests.families.hub_names import by_expert

FILE = "model-mtp.safetensors"


class NextToken(nn.Module):
    """The layer, under the hub's names without ``mtp.``, every number of it random."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, last = config.hidden_size, config.num_hidden_layers - 1
        self.fc = nn.Linear(2 * width, width, bias=False)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            setattr(self, name, Qwen3NextRMSNorm(width, config.rms_norm_eps))
        assert config.layer_types[last] == "full_attention"
        self.layers = nn.ModuleList([Qwen3NextDecoderLayer(config, last)])
        generator = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * min(
                0.2, parameter.shape[-1] ** -0.5
            )

    def forward(self, model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
        """Logits [rows, sequence, vocabulary]; behind the end of the sequence comes token 0."""
        embedding = model.model.embed_tokens(F.pad(ids[:, 1:], (0, 1)))
        x = self.fc(
            torch.cat(
                (self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)), dim=-1
            )
        )
        places = torch.arange(ids.shape[1])
        later = torch.zeros(len(places), len(places)).masked_fill(
            places > places[:, None], -torch.inf
        )
        return model.lm_head(
            self.norm(self.layers[0](x, model.model.rotary_emb(x, places[None]), later[None, None]))
        )

    def named(self, kind: str) -> dict[str, Tensor]:
        """``data`` or ``grad`` of every parameter, under the hub's names."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            layer = "layers.0." if name.startswith("layers.0.") else ""
            for hub, value in by_expert(name.removeprefix(layer), getattr(parameter, kind)):
                found[f"mtp.{layer}{hub}"] = value.contiguous().clone()
        return found


def add_layer(checkpoint: Path) -> None:
    """Write the layer beside the other weights."""
    tensors = NextToken(Qwen3NextConfig.from_pretrained(checkpoint)).named("data")
    save_file(tensors, checkpoint / FILE, {"format": "pt"})
    path = checkpoint / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= dict.fromkeys(tensors, FILE)
    path.write_text(json.dumps(index))
