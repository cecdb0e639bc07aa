# SPDX-License-Identifier: Apache-2.0
"""Train on from existing weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.bridge.checkpoint.model_io import tokenizer_dir
from megatron.bridge.training.callbacks.base import CallbackManager
from megatron.bridge.training.callbacks.report import TuningReport
from megatron.bridge.training.config import ConfigContainer, TokenizerConfig
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.setup import Callbacks
from megatron.bridge.training.state import Run
from megatron.bridge.utils.errors import UserError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def finetune(
    config: ConfigContainer,
    forward_step_func: Callable[..., Any],
    callbacks: Callbacks | None = None,
) -> Run:
    """``pretrain`` from the weights of ``checkpoint.pretrained_checkpoint``, or from where the last run stopped.

    A report is written after the last step.

    Args:
        config: What to run.
        forward_step_func: For example ``megatron.bridge.training.gpt_step.forward_step``.
        callbacks: Callbacks of your own.

    Raises:
        UserError: there are no weights to start from, they were trained with another tokenizer, or whatever
            ``pretrain`` refuses.
    """
    if config.checkpoint.pretrained_checkpoint is None:
        raise UserError(
            "checkpoint.pretrained_checkpoint is not set: give a Megatron checkpoint or a Hugging Face directory, "
            "or use pretrain to start from random weights"
        )
    check_tokenizer(config)
    return pretrain(config, forward_step_func, CallbackManager([*(callbacks or ()), TuningReport()]))


def check_tokenizer(config: ConfigContainer) -> None:
    """Compare the run's tokenizer with the one that lies beside the pretrained weights, if one does.

    Raises:
        UserError: a token has another number: the embeddings would stand for other words, without an error.
    """
    beside = _tokenizer_beside(Path(config.checkpoint.pretrained_checkpoint or ""))
    if beside is not None:
        compare_tokenizers(config.tokenizer, beside)


def compare_tokenizers(chosen: TokenizerConfig, beside: Path) -> None:
    """Compare the run's tokenizer with that in the directory ``beside``.

    Raises:
        UserError: a token has another number.
    """
    if chosen.tokenizer_model is None or Path(chosen.tokenizer_model) == beside:
        return
    from megatron.bridge.data.tokenizer import load_hf_tokenizer

    theirs = load_hf_tokenizer(str(beside), chosen.trust_remote_code).get_vocab()
    try:
        ours = load_hf_tokenizer(chosen.tokenizer_model, chosen.trust_remote_code).get_vocab()
    except UserError as error:
        raise UserError(f"{error}; that of the weights is there: tokenizer.tokenizer_model={beside}") from error
    moved = [token for token, number in theirs.items() if ours.get(token) != number]
    if moved:
        token = min(moved, key=theirs.__getitem__)
        raise UserError(
            f"tokenizer.tokenizer_model={chosen.tokenizer_model} is not the tokenizer of {beside}: {len(moved):,} "
            f"tokens have other numbers, among them {token!r} ({ours.get(token, 'missing')} instead of "
            f"{theirs[token]}); use {beside}"
        )


def _tokenizer_beside(checkpoint: Path) -> Path | None:
    if any((checkpoint / name).is_file() for name in TOKENIZER_FILES):
        return checkpoint
    is_megatron = checkpoint.is_dir() and not (checkpoint / "config.json").is_file()
    return tokenizer_dir(checkpoint) if is_megatron else None
