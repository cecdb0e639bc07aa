# SPDX-License-Identifier: Apache-2.0
"""The schedule of learning rate and weight decay, in the unit of Megatron-Core's: samples."""

from typing import Any, NamedTuple

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.bridge.training.batch_size import BatchSize, samples_of
from megatron.bridge.training.config import ConfigContainer

# What Megatron-Core leaves out of the state.
OWN = ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style")


class Lengths(NamedTuple):
    """Parts of a schedule in samples.

    Attributes:
        warmup: Until the peak of the learning rate.
        decay: Until its minimum, warm-up included.
        wsd_decay: Length of the last part of a WSD schedule, which ends with ``decay``.
        run: Until the last step.
    """

    warmup: int
    decay: int
    wsd_decay: int
    run: int


class Schedule(OptimizerParamScheduler):
    """Megatron-Core's scheduler, with all of it in the checkpoint and all of the checkpoint in it.

    Megatron-Core neither saves nor compares where warm-up begins and how a WSD schedule ends, and gives groups of
    parameters the config's rates even where the checkpoint's shall be used.
    """

    def state_dict(self) -> dict[str, Any]:
        """Everything that the schedule depends on."""
        return super().state_dict() | {name: getattr(self, name) for name in OWN}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned; what an older version did not save keeps its value."""
        before = {"max_lr": self.max_lr, "min_lr": self.min_lr}
        super().load_state_dict(state_dict)
        for name in OWN:
            if name in state_dict:
                setattr(self, name, self._check_and_set(getattr(self, name), state_dict[name], name))
        for group in self.optimizer.param_groups:
            group |= {name: getattr(self, name) for name, value in before.items() if group[name] == value}
        self.step(increment=0)


def build_scheduler(config: ConfigContainer, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The scheduler of a validated config.

    It counts samples, not steps, so that its position keeps its meaning when the batch size changes.
    """
    scheduler, rates, length = config.scheduler, config.optimizer, lengths(config)
    assert rates.lr is not None, "the config is not validated"
    assert rates.min_lr is not None, "the config is not validated"
    assert scheduler.start_weight_decay is not None, "the config is not validated"
    assert scheduler.end_weight_decay is not None, "the config is not validated"
    return Schedule(
        optimizer,
        init_lr=scheduler.lr_warmup_init,
        max_lr=rates.lr,
        min_lr=rates.min_lr,
        lr_warmup_steps=length.warmup,
        lr_decay_steps=length.decay,
        lr_decay_style=scheduler.lr_decay_style,
        start_wd=scheduler.start_weight_decay,
        end_wd=scheduler.end_weight_decay,
        wd_incr_steps=length.run,
        wd_incr_style=scheduler.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=scheduler.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=scheduler.override_opt_param_scheduler,
        wsd_decay_steps=length.wsd_decay,
        lr_wsd_decay_style=scheduler.lr_wsd_decay_style,
    )


def lengths(config: ConfigContainer) -> Lengths:
    """The parts of the schedule of a resolved config, whether it gives steps, samples or a fraction."""
    scheduler, batch = config.scheduler, BatchSize(config.train)
    steps = scheduler.lr_decay_iters or 0
    decay = batch.samples_after(steps) if scheduler.lr_decay_samples is None else scheduler.lr_decay_samples
    if scheduler.lr_warmup_fraction is not None:
        warmup = int(scheduler.lr_warmup_fraction * decay)
    elif scheduler.lr_warmup_samples is not None:
        warmup = scheduler.lr_warmup_samples
    else:
        warmup = batch.samples_after(scheduler.lr_warmup_iters)
    wsd = scheduler.lr_wsd_decay_samples
    if wsd is None:  # the last steps, which are as many samples as the batch has by then
        last = scheduler.lr_wsd_decay_iters or 0
        wsd = decay - batch.samples_after(steps - last) if steps else last * batch.final
    return Lengths(warmup, decay, wsd, samples_of(config.train))
