# SPDX-License-Identifier: Apache-2.0
"""Learning rate and weight decay over the run."""

from dataclasses import dataclass, field
from typing import Any, Literal


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
    lr_warmup_init: float = 0.0
    """Learning rate at the first warmup step."""
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
