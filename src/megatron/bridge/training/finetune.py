# SPDX-License-Identifier: Apache-2.0
"""Train on from existing weights."""

from collections.abc import Callable
from typing import Any

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.setup import Callbacks
from megatron.bridge.training.state import Run
from megatron.bridge.utils.errors import UserError


def finetune(
    config: ConfigContainer, forward_step_func: Callable[..., Any], callbacks: Callbacks | None = None
) -> Run:
    """``pretrain`` from the weights of ``checkpoint.pretrained_checkpoint``, or from where the last run stopped.

    Raises:
        UserError: there are no weights to start from, or whatever ``pretrain`` refuses.
    """
    if config.checkpoint.pretrained_checkpoint is None:
        raise UserError(
            "checkpoint.pretrained_checkpoint is not set: give a Megatron checkpoint or a Hugging Face directory, "
            "or use pretrain to start from random weights"
        )
    return pretrain(config, forward_step_func, callbacks)
