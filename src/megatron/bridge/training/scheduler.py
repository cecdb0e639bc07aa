# SPDX-License-Identifier: Apache-2.0
"""The schedule of learning rate and weight decay, from the configured steps to Megatron-Core's samples."""

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.bridge.training.config import ConfigContainer


def build_scheduler(config: ConfigContainer, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The scheduler of a validated config.

    It counts samples, not steps, so that its position keeps its meaning when the batch size changes.
    """
    scheduler, rates, batch = config.scheduler, config.optimizer, config.train.global_batch_size
    assert scheduler.lr_decay_iters is not None, "the config is not validated"
    assert rates.lr is not None, "the config is not validated"
    assert rates.min_lr is not None, "the config is not validated"
    assert scheduler.start_weight_decay is not None, "the config is not validated"
    assert scheduler.end_weight_decay is not None, "the config is not validated"
    return OptimizerParamScheduler(
        optimizer,
        init_lr=scheduler.lr_warmup_init,
        max_lr=rates.lr,
        min_lr=rates.min_lr,
        lr_warmup_steps=int(warmup_iters(config) * batch),
        lr_decay_steps=scheduler.lr_decay_iters * batch,
        lr_decay_style=scheduler.lr_decay_style,
        start_wd=scheduler.start_weight_decay,
        end_wd=scheduler.end_weight_decay,
        wd_incr_steps=config.train.train_iters * batch,
        wd_incr_style=scheduler.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=scheduler.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=scheduler.override_opt_param_scheduler,
        wsd_decay_steps=(scheduler.lr_wsd_decay_iters or 0) * batch,
        lr_wsd_decay_style=scheduler.lr_wsd_decay_style,
    )


def warmup_iters(config: ConfigContainer) -> float:
    """Steps of warm-up, given directly or as a fraction of the schedule."""
    scheduler = config.scheduler
    if scheduler.lr_warmup_fraction is None:
        return scheduler.lr_warmup_iters
    return scheduler.lr_warmup_fraction * (scheduler.lr_decay_iters or 0)
