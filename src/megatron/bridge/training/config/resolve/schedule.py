# SPDX-License-Identifier: Apache-2.0
"""The length of a run, its learning-rate schedule, and where its logs go."""

import math
from fractions import Fraction

from megatron.bridge.training.config.batch_size import BatchSize
from megatron.bridge.training.config.resolve.findings import Findings
from megatron.bridge.training.config.run_config import RunConfig


def derive_length(config: RunConfig, findings: Findings) -> None:
    """Turn ``num_epochs`` or ``train_samples`` into ``train_iters``."""
    train = config.train
    if train.num_epochs is not None:
        _count_epochs(config, findings)
    if train.train_samples is None:
        return
    steps = BatchSize(train).steps_within(train.train_samples)
    if steps == 0:
        findings.problems.append(
            f"train.train_samples={train.train_samples} are not enough for one step: raise it, or lower "
            f"train.global_batch_size={train.global_batch_size}"
        )
    if train.train_iters not in (
        0,
        steps,
    ):  # the recipe's; a value that the user typed is refused later
        findings.notes.append(
            f"train.train_iters={train.train_iters} is overridden by "
            f"train.train_samples={train.train_samples}, which are {steps} steps"
        )
    train.train_iters = steps


def _count_epochs(config: RunConfig, findings: Findings) -> None:
    train = config.train
    key = f"train.num_epochs={train.num_epochs:g}"
    before = f"train.train_iters={train.train_iters}"
    if findings.count_rows is None:
        findings.notes.append(
            f"{key} replaces {before} when the run has counted the rows of its data"
        )
        return
    rows = findings.count_rows(config)
    batch = train.global_batch_size
    # exact, because 1.1 * 10 is more than 11 in floating point
    steps = math.ceil(Fraction(str(train.num_epochs)) * rows / batch)
    overridden = "" if train.train_iters in (0, steps) else f"; {before} is overridden"
    findings.notes.append(
        f"{key} = {steps:,} steps of {batch} samples, {rows:,} in each epoch{overridden}"
    )
    train.train_iters = steps


def derive_evaluation_alone(config: RunConfig) -> None:
    """Without training, a checkpoint is read for its weights and its step."""
    if config.train.skip_train:
        config.checkpoint.load_optim = False
        config.checkpoint.load_rng = False


def derive_schedule(config: RunConfig, findings: Findings) -> None:
    """Let the decay end with the run, and the weight decay stay as it is."""
    scheduler = config.scheduler
    optimizer = config.optimizer
    steps = config.train.train_iters
    warmup = scheduler.lr_warmup_iters
    if scheduler.lr_decay_iters is None and scheduler.lr_decay_samples is None:
        # a short trial of a long recipe stays within its warm-up
        scheduler.lr_decay_iters = max(steps, warmup + 1)
        if warmup >= steps:
            findings.notes.append(
                f"train.train_iters={steps} ends within scheduler.lr_warmup_iters={warmup}: the learning rate "
                "does not reach its peak"
            )
    if optimizer.min_lr is None:
        optimizer.min_lr = 0.0
    if scheduler.start_weight_decay is None:
        scheduler.start_weight_decay = optimizer.weight_decay
    if scheduler.end_weight_decay is None:
        scheduler.end_weight_decay = optimizer.weight_decay


def derive_folders(config: RunConfig) -> None:
    """Logs go to the run folder. An evaluation alone leaves the folder of the run that it evaluates as it is."""
    if config.logger.log_dir is None and not config.train.skip_train:
        config.logger.log_dir = config.checkpoint.save
