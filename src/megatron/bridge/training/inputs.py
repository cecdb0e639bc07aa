# SPDX-License-Identifier: Apache-2.0
"""What a run reads before its first step, checked without starting it.

A dry run asks the functions that the run itself calls, about everything that is on this machine.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from megatron.bridge.checkpoint import verification
from megatron.bridge.data.config import SPLITS, SFTDatasetConfig
from megatron.bridge.data.finetuning.builder import add_other_problems
from megatron.bridge.data.finetuning.sft_config import HFDatasetConfig
from megatron.bridge.data.tokenizer import Tokenizer
from megatron.bridge.models.conversion import pretrained
from megatron.bridge.models.hf_pretrained.hub import (
    is_hf_model,
    is_hub_id,
    on_this_machine,
    refuse_adapter_beside_weights,
)
from megatron.bridge.training.callbacks.observe.sample_generation import GenerationSamples
from megatron.bridge.training.checkpointing import model_check
from megatron.bridge.training.config import ConfigContainer, Resolved
from megatron.bridge.training.config.resolve.data import tuning_parts
from megatron.bridge.training.reinforcement.rewards import load_rewards
from megatron.bridge.training.reinforcement.tools import load_tools, offer_tools
from megatron.bridge.training.setup import add_tokenizer, count_rows
from megatron.bridge.utils.errors import UserError

_SIZES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
)
_SIZES += ("num_moe_experts", "moe_ffn_hidden_size", "vocab_size")
TRIED_RECORDS = 32  # records of each split that are tokenized; a wrong template or function shows in the first ones


def with_vocabulary(resolved: Resolved[ConfigContainer]) -> Resolved[ConfigContainer]:
    """``resolved``, with ``model.vocab_size`` from the tokenizer if it is unset, as in the run."""
    name = resolved.config.tokenizer.tokenizer_model
    if resolved.config.model.vocab_size is not None or name is None:
        return resolved
    if _is_elsewhere(name):
        raise UserError(
            f"model.vocab_size is not set, and tokenizer.tokenizer_model={name} is not on this machine: a dry run "
            "needs one of them"
        )
    return add_tokenizer(resolved)


def count_rows_here(config: ConfigContainer) -> int:
    """The training rows of an epoch, if their data is on this machine."""
    for missing in elsewhere(config):
        if not missing.startswith("checkpoint."):
            raise UserError(
                f"train.num_epochs={config.train.num_epochs:g} needs the number of rows, and {missing}: set "
                "train.train_iters for a dry run"
            )
    return count_rows(config)


def input_problems(resolved: Resolved[ConfigContainer]) -> list[str]:
    """What the run would refuse in its data, its tokenizer and its first weights, one sentence each."""
    problems: dict[str, None] = {}  # several checks read the data
    checks = (
        lambda run: run.config.dataset.check_sources(),
        _check_records,
        _check_prompts,
        _check_weights,
        _check_second_model,
        _check_rewards,
    )
    for check in checks:
        try:
            check(resolved)
        except UserError as error:
            problems[str(error)] = None
    return list(problems)


def elsewhere(config: ConfigContainer) -> Iterator[str]:
    """What ``input_problems`` cannot check, because it is on the hub and not on this machine."""
    names = {
        "tokenizer.tokenizer_model": config.tokenizer.tokenizer_model,
        "checkpoint.pretrained_checkpoint": config.checkpoint.pretrained_checkpoint,
    }
    for key, name in names.items():
        if _is_elsewhere(name):
            yield f"{key}={name} is not on this machine: the run downloads it, and this dry run has not read it"
    for part in tuning_parts(config.dataset):
        if isinstance(part, HFDatasetConfig) and not part.is_local:
            yield (
                f"dataset.dataset_name={part.dataset_name} is no file or folder here: the run loads it from the "
                "hub, and this dry run has not read it"
            )


def _is_elsewhere(name: str | None) -> bool:
    return name is not None and is_hub_id(name) and on_this_machine(name) is None


def _check_records(resolved: Resolved[ConfigContainer]) -> None:
    tokenizer = _tokenizer(resolved)
    for part in tuning_parts(resolved.config.dataset):
        if tokenizer is not None and isinstance(part, SFTDatasetConfig):
            _try_records(part, tokenizer)


def _check_prompts(resolved: Resolved[ConfigContainer]) -> None:
    tokenizer = _tokenizer(resolved)
    for samples in GenerationSamples.of(resolved.config):
        if tokenizer is not None:
            samples.check(tokenizer, resolved.config.model.seq_length)


def _tokenizer(resolved: Resolved[ConfigContainer]) -> Tokenizer | None:
    """The run's tokenizer; None if it is not on this machine, or if a recipe has none yet."""
    tokenizer = resolved.config.tokenizer
    name = tokenizer.tokenizer_model
    is_missing = name is None and tokenizer.tokenizer_type != "NullTokenizer"
    return None if is_missing or _is_elsewhere(name) else add_tokenizer(resolved).tokenizer


def _try_records(part: SFTDatasetConfig, tokenizer: Tokenizer) -> None:
    if isinstance(part, HFDatasetConfig) and not part.is_local:
        return
    encode = part.encoder(tokenizer)
    try:
        for split in SPLITS:
            source = part.limited_source(split)
            if source is not None:
                encode(list(islice(source.records(), TRIED_RECORDS)))
    except UserError as error:
        raise add_other_problems(error, part, tokenizer) from error


def notes_on_weights(config: ConfigContainer) -> Iterator[str]:
    """Say what the run would say of the weights that it starts from, if they are on this machine."""
    name = config.checkpoint.pretrained_checkpoint
    folder = None if name is None else on_this_machine(name)
    if folder is None:
        return
    note = model_check.describe_other_function(config.model, pretrained.local_weights(str(folder)))
    if note:
        yield note


def _check_weights(resolved: Resolved[ConfigContainer]) -> None:
    checkpoint = resolved.config.checkpoint
    for name in (checkpoint.load, checkpoint.pretrained_checkpoint):
        if name is None or is_hub_id(name) or (name == checkpoint.load == checkpoint.save):
            continue
        folder = pretrained.local_weights(name)
        if is_hf_model(folder):
            refuse_adapter_beside_weights(folder, checkpoint.ignore_adapter)
        else:
            verification.verify(folder, "fast")
        _compare_sizes(resolved.config.model, folder)


def _check_second_model(resolved: Resolved[ConfigContainer]) -> None:
    """Check the folder of the teacher or of the reference as the run does that loads it."""
    distill = resolved.config.distill
    dpo = resolved.config.dpo
    grpo = resolved.config.grpo
    names = {
        "distill.teacher": None if distill is None else distill.teacher,
        "dpo.reference": None if dpo is None else dpo.reference,
        "grpo.reference": None if grpo is None else grpo.reference,
        "grpo.critic.model": None if grpo is None or grpo.critic is None else grpo.critic.model,
    }
    for key, name in names.items():
        if name is None or is_hub_id(name):
            continue
        try:
            folder = pretrained.local_weights(name)
            if is_hf_model(folder):
                refuse_adapter_beside_weights(folder, ignored=False)
            else:
                verification.verify(folder, "fast")
        except UserError as error:
            raise UserError(f"{key}={name}: {error}") from error


def _check_rewards(resolved: Resolved[ConfigContainer]) -> None:
    """Import the reward functions and the tools, as the run does, and offer the tools in the prompts."""
    if resolved.config.grpo is not None:
        load_rewards(resolved.config.grpo)
        offer_tools(resolved.config, load_tools(resolved.config.grpo))


def _compare_sizes(model: Any, weights: Path) -> None:
    """Refuse weights of a model of another size: no tensor of them would fit."""
    stored = pretrained.declared_provider(weights)
    for name in _SIZES:
        size = getattr(model, name)
        stored_size = getattr(stored, name)
        if None not in (size, stored_size) and size != stored_size:
            raise UserError(
                f"model.{name}={size}, but the weights in {weights} have {stored_size}: use its recipe, or "
                f"--hf-model {weights} for its sizes"
            )
