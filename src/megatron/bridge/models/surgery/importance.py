# SPDX-License-Identifier: Apache-2.0
"""How important the layers, neurons, heads and channels of a transformers model are, by what they compute for texts.

See "Compact Language Models via Pruning and Knowledge Distillation" (Minitron, https://arxiv.org/abs/2407.14679).
Widths are judged by the norm of their activations over all tokens, layers by how much they turn the residual stream
(https://arxiv.org/abs/2403.03853).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Importance:
    """Scores of the parts of a model; larger ones matter more.

    Attributes:
        neurons: Of each layer's MLP [intermediate size].
        groups: Of each layer's key heads, each with its query heads [key heads].
        channels: Of the residual stream, over all layers [hidden size].
        layers: Of each layer [layers]: one minus the mean cosine of its input and output.
        tokens: Tokens that the scores were computed from.
    """

    neurons: list[Tensor] = field(default_factory=list[Tensor])
    groups: list[Tensor] = field(default_factory=list[Tensor])
    channels: Tensor = field(default_factory=lambda: torch.zeros(()))
    layers: Tensor = field(default_factory=lambda: torch.zeros(()))
    tokens: int = 0


class _Sums:
    """Sums over tokens, which hooks collect during forward passes."""

    def __init__(self, layers: int) -> None:
        self.neurons: list[Any] = [0.0] * layers
        self.heads: list[Any] = [0.0] * layers
        self.norms: dict[int, Any] = {}
        self.cosines = torch.zeros(layers, dtype=torch.float64)
        self.tokens = 0


@torch.no_grad()
def measure(model: Any, batches: Iterable[Tensor]) -> Importance:
    """Run ``model`` on token ids and score its parts.

    Args:
        model: A causal model of transformers whose layers are named as Llama's.
        batches: Token ids [rows, length] without padding.
    """
    decoder = model.model
    sums = _Sums(len(decoder.layers))
    handles = [*_hooks(decoder, sums)]
    device = next(model.parameters()).device
    try:
        for ids in batches:
            sums.tokens += ids.numel()
            decoder(input_ids=ids.to(device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    groups = model.config.num_key_value_heads
    channel_norms = [value.sqrt() for value in sums.norms.values()]
    return Importance(
        neurons=[value.sqrt().cpu() for value in sums.neurons],
        groups=[value.view(groups, -1).sum(1).sqrt().cpu() for value in sums.heads],
        channels=torch.stack(channel_norms).sum(0).cpu(),
        layers=(1 - sums.cosines / sums.tokens).float(),
        tokens=sums.tokens,
    )


def _hooks(decoder: Any, sums: _Sums) -> Iterable[Any]:
    norms: list[nn.Module] = [decoder.norm]
    for index, layer in enumerate(decoder.layers):
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        yield layer.mlp.down_proj.register_forward_pre_hook(_squares_into(sums.neurons, index))
        yield layer.self_attn.o_proj.register_forward_pre_hook(_squares_into(sums.heads, index))
        yield layer.register_forward_hook(_cosine_into(sums.cosines, index), with_kwargs=True)
    for index, norm in enumerate(norms):
        yield norm.register_forward_hook(_outputs_into(sums.norms, index))


def _squares(values: Tensor) -> Tensor:
    return values.float().square().flatten(0, -2).sum(0)


def _squares_into(table: list[Any], index: int) -> Any:
    def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        table[index] = table[index] + _squares(inputs[0])

    return hook


def _outputs_into(table: dict[int, Any], index: int) -> Any:
    def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        table[index] = table.get(index, 0.0) + _squares(output)

    return hook


def _cosine_into(cosines: Tensor, index: int) -> Any:
    def hook(_module: nn.Module, inputs: Any, options: dict[str, Any], output: Any) -> None:
        before = inputs[0] if inputs else options["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        cosine = torch.cosine_similarity(before.float(), after.float(), dim=-1)
        cosines[index] += cosine.sum().double().cpu()

    return hook
