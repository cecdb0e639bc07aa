# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""The training loop. Everything except the training step is a callback."""

from contextlib import ExitStack
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron.bridge.training.config.batch_size import evaluation_batch
from megatron.bridge.training.state import BatchIterator, Progress, Run, StepResult
from megatron.bridge.training.step import cuda_graphs
from megatron.bridge.training.step.forward_step import checked
from megatron.bridge.training.step.losses import (
    LossReport,
    add_mtp_losses,
    collect_mtp_losses,
    mean_losses,
    router_losses,
)
from megatron.bridge.training.step.router_scale import scaled_router_losses
from megatron.bridge.training.step.sequence_group import microbatches_of_step, own_schedule


def train(run: Run) -> Progress:
    """Train until ``train.train_iters``, or until a callback sets ``run.stop_reason``."""
    with ExitStack() as cleanup:
        cleanup.callback(cuda_graphs.release, run)
        for callback in run.callbacks:
            cleanup.callback(callback.close, run)
        try:
            run.emit("train_start")
            while has_next_step(run):
                run.emit("train_step_start")
                run.last_step = train_step(run)
                advance(run, run.last_step)
                run.emit("train_step_end")
            run.emit("train_end")
        except BaseException as error:
            # no collectives from here on: the other ranks may be anywhere
            run.emit("error", error)
            raise
    return run.progress


def has_next_step(run: Run) -> bool:
    """Return whether the run goes on: it trains, has steps left, and no callback has ended it."""
    train = run.config.train
    return (
        not train.skip_train and run.stop_reason is None and run.progress.step < train.train_iters
    )


def train_step(run: Run) -> StepResult:
    """Run forward and backward over all microbatches, then one optimizer step."""
    zero_gradients(run)
    run.reports = forward_backward(run, run.train_batches)
    run.emit("grads_ready")
    losses = mean_losses(run.loss_totals(run.reports)) | router_losses(run.config)
    learning_rate = float(
        cast(Any, run.scheduler).get_lr({})
    )  # of parameters without overrides; untyped
    updated, grad_norm, zeros = cast(Any, run.optimizer).step()  # untyped
    if updated:
        # counted in samples, so that a schedule does not depend on the batch size
        run.scheduler.step(increment=run.batch_size)
    counted = zeros if run.config.optimizer.log_num_zeros_in_grad else None
    return StepResult(losses, grad_norm, learning_rate, not updated, run.batch_size, counted)


def forward_backward(
    run: Run, batches: list[BatchIterator], forward_only: bool = False
) -> list[LossReport]:
    """Run one global batch through Megatron-Core's schedule, the only code that depends on pipeline stages.

    The gradients in ``main_grad`` are reduced over all ranks and normalized. ``batches`` has an iterator for each
    chunk. The report of the loss function for each microbatch is returned on the last pipeline stage.
    """
    config = run.config
    micro_batch_size = config.train.micro_batch_size
    samples = run.batch_size
    if forward_only:
        micro_batch_size, samples = evaluation_batch(config)
    microbatches = samples // (micro_batch_size * config.data_parallel_size())
    if config.model.hybrid_context_parallel:
        first, microbatches = microbatches_of_step(batches[0], microbatches)
        batches = [first, *batches[1:]]
    returned: list[torch.Tensor] = []  # what is in the loss of each microbatch
    with ExitStack() as contexts:
        contexts.enter_context(own_schedule(run.model))
        mtp_losses = contexts.enter_context(collect_mtp_losses())
        if not forward_only:
            batches = contexts.enter_context(
                scaled_router_losses(run, batches, microbatches, returned)
            )
        reports = run.schedule(
            forward_step_func=checked(
                run.forward_step, config.model.calculate_per_token_loss, returned
            ),
            data_iterator=batches,
            model=run.model,
            num_microbatches=microbatches,
            seq_length=config.dataset.seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
        )
    return add_mtp_losses(mtp_losses, reports)


def zero_gradients(run: Run) -> None:
    for chunk in run.model:
        cast(DistributedDataParallel, chunk).zero_grad_buffer()
    run.optimizer.zero_grad()


def advance(run: Run, result: StepResult) -> None:
    run.progress.step += 1
    run.progress.consumed_train_samples += result.samples
    run.progress.skipped_steps += result.skipped
