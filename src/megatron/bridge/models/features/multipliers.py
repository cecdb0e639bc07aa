# SPDX-License-Identifier: Apache-2.0
"""Scale and normalize embeddings; scale and soft-cap logits.

They apply to the outputs of the embedding and the output layer, so all callers see them exactly once: losses,
multi-token prediction, tied weights, and callers that ask for logits.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

SQRT_HIDDEN_SIZE = "sqrt_hidden_size"


def apply_multipliers(model: nn.Module, config: Any) -> None:
    """Scale embeddings and logits of ``model`` (a ``GPTModel``), and drop embeddings, as ``config`` says."""
    if config.embedding_dropout is not None and hasattr(model, "embedding"):
        model.get_submodule("embedding").embedding_dropout = nn.Dropout(config.embedding_dropout)
    if config.embedding_multiplier != 1.0 and hasattr(model, "embedding"):
        model.get_submodule("embedding.word_embeddings").register_forward_hook(_scale_embeddings(config))
    if config.embedding_norm and hasattr(model, "embedding"):
        model.get_submodule("embedding.word_embeddings").register_forward_hook(_norm_embeddings(config))
    changes = (config.logits_scaling, config.final_logit_softcapping) != (1.0, None)
    if changes and hasattr(model, "output_layer"):
        model.get_submodule("output_layer").register_forward_hook(_change_logits(config))


def _scale_embeddings(config: Any) -> Any:
    factor = config.embedding_multiplier

    def scale(_module: nn.Module, _inputs: Any, embeddings: Tensor) -> Tensor:
        if factor != SQRT_HIDDEN_SIZE:
            return embeddings * factor
        # Gemma was trained with the factor in the precision of its embeddings: 55.5 in bf16, not 55.4256
        return embeddings * torch.tensor(math.sqrt(config.hidden_size), dtype=embeddings.dtype)

    return scale


def _norm_embeddings(config: Any) -> Any:
    def norm(_module: nn.Module, _inputs: Any, embeddings: Tensor) -> Tensor:
        return nn.functional.rms_norm(embeddings, embeddings.shape[-1:], eps=config.layernorm_epsilon)

    return norm


def _change_logits(config: Any) -> Any:
    divisor, cap = config.logits_scaling, config.final_logit_softcapping

    def change(_module: nn.Module, _inputs: Any, outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits, bias = outputs
        logits = logits if divisor == 1.0 else logits / divisor
        return (logits if cap is None else torch.tanh(logits / cap) * cap), bias

    return change
