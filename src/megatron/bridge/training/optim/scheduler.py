# SPDX-License-Identifier: Apache-2.0
"""The schedule of learning rate and weight decay, in Megatron-Core's unit: samples."""

from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.config.batch_size import ScheduleLengths, lengths

# Attributes that Megatron-Core does not save.
EXTRA_STATE = ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style")


class Schedule(OptimizerParamScheduler):
    """Megatron-Core's scheduler with complete state, and with a warmup whose first step trains.

    Megatron-Core does not save or compare the start of the warmup and the end of a WSD schedule, and sets the
    rates of parameter groups from the config even if those of the checkpoint should be used.

    Args:
        optimizer: Its parameter groups get the rates.
        init_lr: Learning rate of the first warmup step. None rises in equal steps from above 0: before a step, the
            rate is ``peak * (n + first_step) / (lr_warmup_steps + first_step)`` after n samples.
        first_step: Samples of the first step.
        options: Further arguments of Megatron-Core's class.
    """

    init_lr: float | None  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        init_lr: float | None,
        first_step: int,
        **options: Any,
    ) -> None:
        super().__init__(optimizer, init_lr=init_lr or 0.0, **options)
        self.init_lr = init_lr
        self.first_step = first_step
        self.step(increment=0)

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Return the learning rate of a parameter group before the next step."""
        warms_up = self.lr_warmup_steps > 0 and self.num_steps <= self.lr_warmup_steps
        if self.init_lr is not None or not warms_up:
            return super().get_lr(param_group)
        peak = param_group.get("max_lr", self.max_lr)
        samples = self.num_steps + self.first_step
        return peak * samples / (self.lr_warmup_steps + self.first_step)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {name: getattr(self, name) for name in EXTRA_STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore ``state_dict``; a value that an older version did not save is kept.

        An open start of the warmup is that of the checkpoint, which was 0 where it was not saved.
        """
        before = {"max_lr": self.max_lr, "min_lr": self.min_lr}
        if self.init_lr is None:
            self.init_lr = state_dict.get("init_lr", 0.0)
        super().load_state_dict(state_dict)
        for name in EXTRA_STATE:
            if name in state_dict:
                setattr(
                    self, name, self._check_and_set(getattr(self, name), state_dict[name], name)
                )
        for group in self.optimizer.param_groups:
            group |= {
                name: getattr(self, name) for name, value in before.items() if group[name] == value
            }
        self.step(increment=0)


def build_scheduler(
    config: ConfigContainer, optimizer: MegatronOptimizer
) -> OptimizerParamScheduler:
    """The scheduler for a resolved config, which counts samples, as the batch size may change."""
    return schedule(config.scheduler, config.optimizer, lengths(config), optimizer)


def schedule(
    scheduler: Any, rates: Any, length: ScheduleLengths, optimizer: MegatronOptimizer
) -> Schedule:
    """Build the LR scheduler; all rates and weight decays must be resolved."""
    return Schedule(
        optimizer,
        init_lr=scheduler.lr_warmup_init,
        first_step=length.first_step,
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
