# SPDX-License-Identifier: Apache-2.0
"""The training loop, and one step of it, for programs that set up model, optimizer and data themselves."""

from collections.abc import Callable
from typing import Any

import torch

from megatron.bridge.compat.training_calls import run_of
from megatron.bridge.data.loaders import Iterators
from megatron.bridge.data.tokenizer import build_tokenizer
from megatron.bridge.training import loop
from megatron.bridge.training.callbacks.base import CallbackManager
from megatron.bridge.training.callbacks.defaults import default_callbacks
from megatron.bridge.training.setup import check_forward_step
from megatron.bridge.training.state import GlobalState, Progress, Run
from megatron.bridge.training.step.forward_step import bind_state
from megatron.bridge.utils.errors import UserError

StepOutcome = tuple[
    dict[str, torch.Tensor], int, bool, bool, int | None, float | None, float | None
]


def train(
    forward_step_func: Callable[..., Any],
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
    train_data_iterator: Any,
    valid_data_iterator: Any,
    global_state: GlobalState,
    checkpoint_manager: Any = None,
    pg_collection: Any = None,
    process_non_loss_data_func: Callable[..., Any] | None = None,
    non_loss_data_func: Callable[..., Any] | None = None,
    callback_manager: CallbackManager | None = None,
) -> Progress:
    """Train until ``train.train_iters``, with the logging, evaluation and saving of ``global_state.cfg``.

    Args:
        forward_step_func: The forward step.
        model: Chunks of this rank.
        optimizer: As ``setup_optimizer`` returns it.
        scheduler: The same.
        train_data_iterator: Microbatches of this rank; with several chunks, an iterator for each.
        valid_data_iterator: The same for evaluation, as ``setup_data_iterators`` returns it; None evaluates nothing.
        global_state: The validated config, and the progress, which is advanced.
        checkpoint_manager: Only None: ``cfg.checkpoint`` says what is saved.
        pg_collection: Megatron-Core's own groups are used.
        process_non_loss_data_func: Only None, as the next one.
        non_loss_data_func: Write a callback instead.
        callback_manager: More callbacks.

    Returns:
        The progress at the end.
    """
    del pg_collection
    unused = {
        "checkpoint_manager": checkpoint_manager,
        "process_non_loss_data_func": process_non_loss_data_func,
        "non_loss_data_func": non_loss_data_func,
    }
    for name, value in unused.items():
        if value is not None:
            raise UserError(
                f"train({name}=...) is not supported: leave it None; cfg.checkpoint says what is saved, and "
                "callbacks can compute and save more"
            )
    run = _make_run(forward_step_func, model, optimizer, scheduler, global_state)
    run.tokenizer = build_tokenizer(run.config.tokenizer)
    run.callbacks = default_callbacks(run.config, callback_manager or (), None)
    run.train_batches = _per_chunk(train_data_iterator, len(model))
    valid = valid_data_iterator[0] if isinstance(valid_data_iterator, list) else valid_data_iterator
    if valid is not None and not hasattr(valid, "replicate"):
        raise UserError(
            f"valid_data_iterator={type(valid).__name__} cannot start again for each evaluation: use one of "
            "data.loaders.setup_data_iterators, or None"
        )
    batches: Any = run.train_batches[0]
    run.data = Iterators(batches, valid, None)
    return loop.train(run)


def train_step(
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
    global_state: GlobalState,
    pg_collection: Any = None,
    forward_backward_func: Callable[..., Any] | None = None,
    p2p_communicator: Any = None,
) -> StepOutcome:
    """Run forward and backward over all microbatches of a step, then the optimizer and its schedule.

    Args:
        forward_step_func: The forward step.
        data_iterator: Microbatches of this rank; with several chunks, an iterator for each.
        model: Chunks of this rank.
        optimizer: As ``setup_optimizer`` returns it.
        scheduler: The same.
        global_state: The validated config, and the progress, which the caller advances.
        pg_collection: Megatron-Core's own groups are used.
        forward_backward_func: Megatron-Core's schedule for these groups is used.
        p2p_communicator: The same.

    Returns:
        Mean losses by name, 1 if the update was skipped because gradients were not finite, whether to save and to
        exit (False), the exit code (None), the norm of the gradient, and its zeros if they are counted.
    """
    del pg_collection, forward_backward_func, p2p_communicator
    run = _make_run(forward_step_func, model, optimizer, scheduler, global_state)
    run.train_batches = _per_chunk(data_iterator, len(model))
    result = loop.train_step(run)
    return (
        result.loss_dict,
        int(result.skipped),
        False,
        False,
        None,
        result.grad_norm,
        result.zeros_in_grad,
    )


def _make_run(
    forward_step: Callable[..., Any],
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
    state: GlobalState,
) -> Run:
    check_forward_step(forward_step, state.cfg)
    run = run_of(state, model, optimizer, scheduler)
    run.forward_step = bind_state(forward_step, run)
    return run


def _per_chunk(iterators: Any, chunks: int) -> list[Any]:
    """Return an iterator for each chunk."""
    if isinstance(iterators, list):
        return iterators
    if chunks > 1:
        raise UserError(
            f"one iterator for {chunks} chunks: give a list, as setup_data_iterators(model_length={chunks}) returns"
        )
    return [iterators]
