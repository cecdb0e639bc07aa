# SPDX-License-Identifier: Apache-2.0
"""Gradients for adapters inside recomputed layers, and behind pipeline stages without any.

A recomputed layer is one autograd node over its inputs: its parameters get gradients only if an input asks for
one. Behind a frozen embedding none does, and the adapters of the first layer would stay as they are, in silence.
"""

from typing import Any

from torch import Tensor, nn


def let_gradients_start(chunk: nn.Module) -> None:
    """Let the outputs of a frozen embedding ask for a gradient where something depends on it.

    It costs the gradient of the first layer's inputs, which is not used.
    """
    config: Any = getattr(chunk, "config", None)
    embedding = getattr(chunk, "embedding", None)
    if embedding is None or config is None:
        return
    if config.recompute_granularity is not None or config.pipeline_model_parallel_size > 1:
        embedding.register_forward_hook(_ask_for_gradient)


def _ask_for_gradient(module: nn.Module, inputs: Any, output: Tensor) -> None:
    if not output.requires_grad:
        output.requires_grad_(True)
