# SPDX-License-Identifier: Apache-2.0
"""How long to train, with which batch size."""

from dataclasses import dataclass, field


@dataclass
class TrainingConfig:
    """How long to train, with which batch size."""

    micro_batch_size: int = 1
    """Samples per forward pass on one data-parallel rank."""
    global_batch_size: int = 1
    """Samples per optimizer step, over all ranks."""
    rampup_batch_size: list[int] | None = None
    """``[start, increment, samples]``: start with ``start`` samples per step and add ``increment`` at regular
    intervals, to reach ``global_batch_size`` after ``samples`` samples.
    """
    train_iters: int = 0
    """Optimizer steps of the whole run, including the steps before a resume."""
    train_samples: int | None = None
    """Samples of the whole run. Replaces ``train_iters``: the run takes as many whole steps as fit."""
    num_epochs: float | None = None
    """Passes over the training data, also a fraction. Replaces ``train_iters``: the run counts its rows, after
    packing, and takes ``ceil(num_epochs * rows / global_batch_size)`` steps.
    """
    exit_interval: int | None = None
    """Save and stop after a step whose number is a multiple of this."""
    exit_duration_in_mins: float | None = None
    """Save and stop at the end of the step in which this many minutes have passed since the process started. The
    exit code is 75, which asks the scheduler to requeue the job.
    """
    exit_signal_handler: bool = True
    """Save and stop on SIGTERM and SIGUSR1, with exit code 75, and on Ctrl-C, with exit code 130, if
    ``checkpoint.save`` is set.
    """
    iterations_to_skip: list[int] = field(default_factory=list[int])
    """Steps whose batch is read but not trained on."""
    frozen: list[str] = field(default_factory=list[str])
    """Patterns of parameters to freeze, such as ``embedding.*`` or ``decoder.layers.0.*``: Megatron's
    names, ``*`` for any characters, layers numbered over all pipeline stages.
    """
    manual_gc: bool = False
    """Turn off Python's automatic garbage collection and collect at the same step on all ranks."""
    manual_gc_interval: int = 0
    """Steps between collections with ``manual_gc``; 0 collects only around evaluation."""
