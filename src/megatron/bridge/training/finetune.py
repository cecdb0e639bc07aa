# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning: train from existing weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.bridge.checkpoint.model_io import tokenizer_dir
from megatron.bridge.data.tokenizer import load_hf_tokenizer
from megatron.bridge.models.conversion.pretrained import is_megatron_checkpoint, local_weights
from megatron.bridge.models.hf_pretrained import hub
from megatron.bridge.training.callbacks.base import CallbackManager
from megatron.bridge.training.callbacks.observe.report import FinetuningReport
from megatron.bridge.training.config import ConfigContainer, TokenizerConfig
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.setup import AnyConfig, Callbacks, container_of
from megatron.bridge.training.state import Run
from megatron.bridge.utils.errors import UserError


def finetune(
    config: AnyConfig, forward_step_func: Callable[..., Any], callbacks: Callbacks | None = None
) -> Run:
    """``pretrain`` from the weights of ``checkpoint.pretrained_checkpoint``, or resume an earlier run.

    A report is written after the last step.

    Args:
        config: The configuration. An unresolved one is resolved into a copy; the original is not modified.
        forward_step_func: For example ``megatron.bridge.training.gpt_step.forward_step``.

    Raises:
        UserError: There are no pretrained weights, they were trained with another tokenizer, or ``pretrain``
            refuses the config.
    """
    given = container_of(config)
    if given.checkpoint.pretrained_checkpoint is None:
        raise UserError(
            "checkpoint.pretrained_checkpoint is not set: set it to a Megatron checkpoint or a Hugging Face "
            "directory, or use pretrain to start from random weights"
        )
    check_tokenizer(given)
    return pretrain(
        config, forward_step_func, CallbackManager([*(callbacks or ()), FinetuningReport()])
    )


def check_tokenizer(config: ConfigContainer) -> None:
    """Compare the run's tokenizer with the one in the directory of the pretrained weights, if there is one.

    Raises:
        UserError: The id of a token differs: the embeddings would silently belong to other tokens.
    """
    name = config.checkpoint.pretrained_checkpoint
    assert name is not None, "there are no weights to compare with"
    folder = local_weights(name)  # on every rank: each node downloads what the hub has
    if name != config.tokenizer.tokenizer_model:
        compare_tokenizers(config.tokenizer, folder)


def compare_tokenizers(chosen: TokenizerConfig, name: str | Path) -> None:
    """Refuse other token ids than those of the tokenizer next to the weights ``name``, if there is one."""
    folder = (
        tokenizer_dir(name) if is_megatron_checkpoint(name) else hub.resolve(name, weights=False)
    )
    if folder is None or not hub.has_tokenizer(folder):
        return
    if chosen.tokenizer_model is None or Path(chosen.tokenizer_model) == folder:
        return
    their_ids = load_hf_tokenizer(str(folder), chosen.trust_remote_code).get_vocab()
    try:
        own_ids = load_hf_tokenizer(chosen.tokenizer_model, chosen.trust_remote_code).get_vocab()
    except UserError as error:
        raise UserError(
            f"{error}; the tokenizer of the weights is tokenizer.tokenizer_model={folder}"
        ) from error
    moved = [token for token, token_id in their_ids.items() if own_ids.get(token) != token_id]
    if moved:
        token = min(moved, key=their_ids.__getitem__)
        raise UserError(
            f"tokenizer.tokenizer_model={chosen.tokenizer_model} is not the tokenizer of {folder}: the ids of "
            f"{len(moved):,} tokens differ, for example of {token!r} ({own_ids.get(token, 'missing')} instead of "
            f"{their_ids[token]}); use {folder}"
        )
