# SPDX-License-Identifier: Apache-2.0
"""The padding token has no gradient as an input, as with ``padding_idx`` of ``torch.nn.Embedding``.

transformers gives ``config.pad_token_id`` to the embeddings of most architectures. The row keeps the gradient that it
has as an output where the embedding is tied to the output layer. Values of the forward pass do not change.
"""

from functools import partial
from typing import Any

from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from torch import Tensor, nn


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
