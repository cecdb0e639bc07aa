# SPDX-License-Identifier: Apache-2.0
"""Learned positions: how many there are, and which row of their table is the first."""

from typing import Any

from torch import Tensor, nn

from megatron.bridge.utils.errors import UserError


def check(config: Any) -> None:
    """Refuse sequences that are longer than the table of learned positions."""
    if config.position_embedding_type != "learned_absolute" or config.max_position_embeddings is None:
        return
    if config.seq_length > config.max_position_embeddings:
        raise UserError(
            f"seq_length={config.seq_length} is more than max_position_embeddings="
            f"{config.max_position_embeddings}, the positions that this model has learned: use shorter sequences"
        )


def apply_offset(model: nn.Module, config: Any) -> None:
    """Start the positions of ``model`` (a ``GPTModel``) at row ``config.position_offset`` of their table."""
    if not config.position_offset or not hasattr(model, "embedding"):
        return

    def shift(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (inputs[0] + config.position_offset,)

    model.get_submodule("embedding.position_embeddings").register_forward_pre_hook(shift)
