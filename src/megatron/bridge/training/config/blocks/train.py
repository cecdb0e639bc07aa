# SPDX-License-Identifier: Apache-2.0
"""How long to train, with which batch size and rates, evaluation, and random numbers."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from megatron.bridge.utils.config.ranges import AT_LEAST_ONE, AT_LEAST_ZERO, MINUTES, SEED, Range


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
    exit_interval: Annotated[int | None, AT_LEAST_ONE] = None
    """Save and stop after a step whose number is a multiple of this."""
    exit_duration_in_mins: Annotated[float | None, MINUTES] = None
    """Save and stop at the end of the step in which this many minutes have passed since the process started. The
    exit code is 75, which asks the scheduler to requeue the job.
    """
    exit_signal_handler: bool = True
    """Save and stop on SIGTERM and SIGUSR1, with exit code 75, and on Ctrl-C, with exit code 130, if
    ``checkpoint.save`` is set.
    """
    iterations_to_skip: Annotated[list[int], Range(least=1, of_items=True)] = field(
        default_factory=list[int]
    )
    """Steps whose batch is read but not trained on."""
    frozen: list[str] = field(default_factory=list[str])
    """Patterns of parameters to freeze, such as ``embedding.*`` or ``decoder.layers.0.*``: Megatron's
    names, ``*`` for any characters, layers numbered over all pipeline stages.
    """
    label_smoothing: Annotated[float, Range(least=0, below=1)] = 0.0
    """Share of the probability of each target that the training loss spreads over the vocabulary, as
    ``label_smoothing`` of PyTorch's ``cross_entropy``. Evaluations do not smooth.
    """
    neftune_noise_alpha: Annotated[float | None, Range(above=0)] = None
    """Add uniform noise of this strength to the embeddings of training samples (NEFTune); usual are 5 to 15."""
    skip_train: bool = False
    """Evaluate the weights on validation and test data, and train nothing: there is no optimizer, and nothing is
    saved.
    """
    manual_gc: bool = False
    """Turn off Python's automatic garbage collection and collect at the same step on all ranks."""
    manual_gc_interval: Annotated[int, AT_LEAST_ZERO] = 0
    """Steps between collections with ``manual_gc``; 0 collects only around evaluation."""


@dataclass
class ValidationConfig:
    """Evaluation on held-out data."""

    eval_interval: Annotated[int | None, AT_LEAST_ONE] = None
    """Steps between evaluations; None evaluates once, at the end."""
    eval_iters: Annotated[int, AT_LEAST_ZERO] = 0
    """Global batches in one evaluation; 0 switches evaluation off."""
    eval_micro_batch_size: Annotated[int | None, AT_LEAST_ONE] = None
    """Samples per forward pass of an evaluation; None is ``train.micro_batch_size``."""
    eval_global_batch_size: Annotated[int | None, AT_LEAST_ONE] = None
    """Samples per global batch of an evaluation; None is ``train.global_batch_size``."""
    sets: dict[str, str | None] = field(default_factory=dict[str, str | None])
    """Validation sets by name, instead of the validation split of ``dataset``: what to read in its place (the prefix of
    a corpus, or the folder or name of a dataset of records), or None for the split itself. Each is evaluated on
    ``eval_iters`` batches, and its losses are reported as ``NAME/lm loss``.
    """
    patience: Annotated[int | None, AT_LEAST_ONE] = None
    """End the run after this many evaluations in a row that are no better than the best one; None goes on."""
    metric: str | None = None
    """What makes an evaluation better: the name of a loss that it reports. None is the first one."""
    metric_mode: Literal["min", "max"] = "min"
    """Whether small (``min``) or large (``max``) values of the metric are better."""
    min_delta: Annotated[float, AT_LEAST_ZERO] = 0.0
    """An evaluation is better if the metric improves by more than this."""


@dataclass
class SchedulerConfig:
    """Learning rate and weight decay over the run, in optimizer steps or in samples."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay after warmup."""
    lr_decay_iters: int | None = None
    """Steps until ``optimizer.min_lr``, warmup included. None means ``train.train_iters``, but at least one step
    more than the warmup.
    """
    lr_decay_samples: int | None = None
    """``lr_decay_iters`` in samples. Set one of the two."""
    lr_warmup_iters: int = 0
    """Steps of linear warmup."""
    lr_warmup_samples: int | None = None
    """``lr_warmup_iters`` in samples. Set one of the two."""
    lr_warmup_fraction: float | None = None
    """Warmup as a fraction of the decay, instead of steps or samples."""
    lr_warmup_init: float | None = None
    """Learning rate of the first warmup step. None rises in equal steps that begin above 0, so that the first step
    trains. In Megatron-LM and transformers the warmup begins at 0.
    """
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the final decay of the WSD schedule."""
    lr_wsd_decay_iters: int | None = None
    """Steps of the final decay of the WSD schedule."""
    lr_wsd_decay_samples: int | None = None
    """``lr_wsd_decay_iters`` in samples. Set one of the two."""
    start_weight_decay: float | None = None
    """Weight decay at the start. None means ``optimizer.weight_decay``."""
    end_weight_decay: float | None = None
    """Weight decay at the end. None means ``optimizer.weight_decay``."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How the weight decay grows from the start value to the end value."""
    use_checkpoint_opt_param_scheduler: bool = False
    """On resume, use the schedule of the checkpoint."""
    override_opt_param_scheduler: bool = False
    """On resume, use the schedule of this config. With neither option, a resumed run is refused if its schedule
    differs from the checkpoint's.
    """
    lengths: Any = field(default=None, init=False, repr=False, compare=False)
    """The parts in samples, which ``validate`` of a config without data notes here for ``setup_optimizer``."""


@dataclass
class RNGConfig:
    """Random numbers."""

    seed: Annotated[int, SEED] = 1234
    """Seed of weight initialization, dropout and data order."""
    data_parallel_random_init: bool = False
    """Initialize each data-parallel rank with its own seed, then broadcast the first rank's weights."""
