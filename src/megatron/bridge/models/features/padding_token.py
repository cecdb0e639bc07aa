# SPDX-License-Identifier: Apache-2.0
"""The padding token has no gradient as an input, as with ``padding_idx`` of ``torch.nn.Embedding``.

transformers gives ``config.pad_token_id`` to the embeddings of most architectures. The row keeps the gradient that it
has as an output where the embedding is tied to the output layer. Values of the forward pass do not change.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from torch import Tensor, nn

from megatron.bridge.models.features.feature import LayerFeature
from megatron.bridge.utils.config.ranges import AT_LEAST_ZERO


@dataclass
class PaddingTokenFields:
    embedding_padding_idx: Annotated[int | None, AT_LEAST_ZERO] = None
    """The token whose input embedding has no gradient, as ``padding_idx`` of ``torch.nn.Embedding``; models from
    Hugging Face have it where transformers' own class does. None trains all rows."""


class PaddingTokenFeature(LayerFeature):
    pricing = {"embedding_padding_idx": "numbers"}

    def change_model(self, model: nn.Module, config: Any) -> None:
        stop_padding_gradients(model, config)


def stop_padding_gradients(model: nn.Module, config: Any) -> None:
    """Keep gradients from the row ``config.embedding_padding_idx`` of every table of token embeddings in ``model``."""
    if config.embedding_padding_idx is None:
        return
    hook = partial(_stop_gradients, config.embedding_padding_idx)
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.register_forward_hook(hook)


def _stop_gradients(
    padding_idx: int, module: VocabParallelEmbedding, inputs: tuple[Tensor, ...], embeddings: Tensor
) -> None:
    if not embeddings.requires_grad:
        return
    is_padding = inputs[0] == padding_idx
    if module.reduce_scatter_embeddings:  # this rank has its share of the sequence, [s/tp, b, h]
        group: Any = module.tp_group
        is_padding = is_padding.transpose(0, 1).chunk(group.size())[group.rank()]
    positions = is_padding.unsqueeze(-1)
    embeddings.register_hook(lambda gradient: gradient.masked_fill(positions, 0))
