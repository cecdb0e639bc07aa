# SPDX-License-Identifier: Apache-2.0
"""Rules on values that must fit each other, whatever the layout."""

from pathlib import Path

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.optional import installed, missing

NOT_YET = ("tensor_inspect",)
NVRX = "nvidia_resiliency_ext"


def future_blocks_are_unset(config: ConfigContainer, world_size: int) -> str | None:
    """Blocks without a feature behind them would be ignored."""
    used = [name for name in NOT_YET if getattr(config, name) is not None]
    return f"{', '.join(used)}: not available in this version, leave unset" if used else None


def adapters_can_be(config: ConfigContainer, world_size: int) -> str | None:
    """The method knows what its values may be."""
    return None if config.peft is None else "; ".join(config.peft.problems()) or None


def adapters_have_a_base(config: ConfigContainer, world_size: int) -> str | None:
    """Adapters are nothing by themselves."""
    if config.peft is None or config.checkpoint.pretrained_checkpoint is not None:
        return None
    return (
        f"peft is {type(config.peft).__name__}, but checkpoint.pretrained_checkpoint is not set: give the weights "
        "to put the adapters on, a Megatron checkpoint or a Hugging Face directory"
    )


def sequence_fits_model(config: ConfigContainer, world_size: int) -> str | None:
    """Positions beyond the model's length do not exist, or were never trained."""
    length, limit = config.dataset.seq_length, config.model.seq_length
    if length <= limit:
        return None
    return (
        f"dataset.seq_length={length} is longer than model.seq_length={limit}: lower it to {limit}, or raise "
        "model.seq_length"
    )


def one_half_precision(config: ConfigContainer, world_size: int) -> str | None:
    """bf16 and fp16 exclude each other."""
    if not (config.model.bf16 and config.model.fp16):
        return None
    return "model.bf16=True and model.fp16=True exclude each other: switch one off, or set mixed_precision"


def per_token_loss_is_summed(config: ConfigContainer, world_size: int) -> str | None:
    """Gradients are divided by the number of tokens at the end, so the collective must sum."""
    if not (config.model.calculate_per_token_loss and config.ddp.average_in_collective):
        return None
    return (
        "ddp.average_in_collective=True cannot be used with model.calculate_per_token_loss=True: switch the "
        "first off"
    )


def no_partial_checkpointing(config: ConfigContainer, world_size: int) -> str | None:
    """Megatron-Core would pass forward steps an argument that none of their forms has."""
    value = config.model.num_microbatches_with_partial_activation_checkpoints
    if value is None:
        return None
    return (
        f"model.num_microbatches_with_partial_activation_checkpoints={value}: not available in this version, use "
        "model.recompute_granularity"
    )


def dropouts_are_probabilities(config: ConfigContainer, world_size: int) -> str | None:
    """In [0, 1)."""
    names = ("hidden_dropout", "attention_dropout")
    wrong = [
        f"model.{name}={getattr(config.model, name)}" for name in names if not 0 <= getattr(config.model, name) < 1
    ]
    return f"{', '.join(wrong)}: must lie in [0, 1)" if wrong else None


def intervals_are_positive(config: ConfigContainer, world_size: int) -> str | None:
    """An interval is None or at least one step."""
    intervals = {
        "train.exit_interval": config.train.exit_interval,
        "validation.eval_interval": config.validation.eval_interval,
        "checkpoint.save_interval": config.checkpoint.save_interval,
        "checkpoint.non_persistent_save_interval": config.checkpoint.non_persistent_save_interval,
    }
    wrong = [f"{key}={value}" for key, value in intervals.items() if value is not None and value < 1]
    if config.straggler is not None and config.straggler.interval < 1:
        wrong.append(f"straggler.interval={config.straggler.interval}")
    counts = {
        "validation.eval_iters": config.validation.eval_iters,
        "train.manual_gc_interval": config.train.manual_gc_interval,
        "rng.seed": config.rng.seed,
    }
    negative = [f"{key}={value}" for key, value in counts.items() if value < 0]
    skipped = config.train.iterations_to_skip
    if min(skipped, default=1) < 1:
        wrong.append(f"train.iterations_to_skip={skipped}")
    sentences = [f"{', '.join(wrong)}: must be at least 1, or unset"] if wrong else []
    sentences += [f"{', '.join(negative)}: must not be negative"] if negative else []
    return "; ".join(sentences) or None


def time_limits_are_positive(config: ConfigContainer, world_size: int) -> str | None:
    """No time at all would end a run at once."""
    limits = {
        "train.exit_duration_in_mins": config.train.exit_duration_in_mins,
        "dist.distributed_timeout_minutes": config.dist.distributed_timeout_minutes,
        "dist.hang_timeout_minutes": config.dist.hang_timeout_minutes,
    }
    wrong = [f"{key}={minutes}" for key, minutes in limits.items() if minutes is not None and minutes <= 0]
    return f"{', '.join(wrong)}: must be above 0, or unset" if wrong else None


def one_checkpoint_is_kept(config: ConfigContainer, world_size: int) -> str | None:
    """The newest, at least."""
    kept = config.checkpoint.most_recent_k
    if kept == -1 or kept > 0:
        return None
    return f"checkpoint.most_recent_k={kept}: must be at least 1, or -1 to keep all"


def finetuning_has_a_folder_of_its_own(config: ConfigContainer, world_size: int) -> str | None:
    """A run goes on from what is in its folder, at the step where that was saved."""
    checkpoint = config.checkpoint
    if not (checkpoint.finetune and checkpoint.load and checkpoint.save):
        return None
    if Path(checkpoint.load) != Path(checkpoint.save):
        return None
    return (
        f"checkpoint.finetune=True with checkpoint.load={checkpoint.load}, which is checkpoint.save, too: a run "
        "goes on from its own folder, so choose another checkpoint.save"
    )


def background_has_a_writer(config: ConfigContainer, world_size: int) -> str | None:
    """One that writes in the background, and is installed."""
    checkpoint = config.checkpoint
    if checkpoint.async_strategy == "thread":
        return None
    if not installed(NVRX):
        return missing(NVRX, "checkpoint.async_strategy=nvrx", "resiliency")
    return None
