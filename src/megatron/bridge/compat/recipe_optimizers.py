# SPDX-License-Identifier: Apache-2.0
"""Optimizers with a cosine schedule, as recipes of other programs build them."""

from typing import Any

from megatron.bridge.training.config import OptimizerConfig, SchedulerConfig

Optimization = tuple[OptimizerConfig, SchedulerConfig]
_SCHEDULER_DECAY = 0.033
"""Weight decay of schedules with ``constant`` increase, where the optimizer's own is in effect."""


def distributed_fused_adam_with_cosine_annealing(
    precision: str = "bf16-mixed",
    lr_warmup_iters: int = 2000,
    lr_decay_iters: int | None = None,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.95,
    adam_eps: float = 1e-8,
    weight_decay: float = 0.1,
    max_lr: float = 1e-4,
    min_lr: float | None = None,
    clip_grad: float = 1.0,
    start_weight_decay: float = _SCHEDULER_DECAY,
    end_weight_decay: float = _SCHEDULER_DECAY,
    weight_decay_incr_style: str = "constant",
    lr_decay_style: str = "cosine",
) -> Optimization:
    """Return Adam with a distributed state, and its schedule in steps.

    Args:
        precision: ``bf16-mixed``, ``16-mixed``, or another one, which leaves both half precisions off.
        lr_warmup_iters: Steps during which the learning rate increases.
        lr_decay_iters: Steps until ``min_lr``; None is the length of the training.
        adam_beta1: Decay of the mean of gradients.
        adam_beta2: Decay of the mean of their squares.
        adam_eps: Added to the root of the latter.
        weight_decay: Factor of weight decay.
        max_lr: Peak learning rate.
        min_lr: Final learning rate; None is a tenth of ``max_lr``.
        clip_grad: Largest norm of the gradient.
        start_weight_decay: With a style other than ``constant``, the first weight decay.
        end_weight_decay: The last one.
        weight_decay_incr_style: How weight decay changes between them.
        lr_decay_style: Shape of the decay.
    """
    optimizer = _adam(
        precision, adam_beta1, adam_beta2, adam_eps, weight_decay, max_lr, min_lr, clip_grad
    )
    increases = weight_decay_incr_style != "constant"
    scheduler = SchedulerConfig(
        lr_decay_style=lr_decay_style,  # pyright: ignore[reportArgumentType]  checked with the config
        lr_warmup_iters=lr_warmup_iters,
        lr_decay_iters=lr_decay_iters,
        weight_decay_incr_style=weight_decay_incr_style,  # pyright: ignore[reportArgumentType]
        start_weight_decay=start_weight_decay if increases else None,
        end_weight_decay=end_weight_decay if increases else None,
    )
    return optimizer, scheduler


def distributed_fused_adam_with_cosine_annealing_samples(
    precision: str = "bf16-mixed",
    lr_warmup_samples: int | None = None,
    lr_decay_samples: int | None = None,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.95,
    adam_eps: float = 1e-8,
    weight_decay: float = 0.1,
    max_lr: float = 1e-4,
    min_lr: float | None = None,
    clip_grad: float = 1.0,
) -> Optimization:
    """Return the same with a schedule in samples; see ``distributed_fused_adam_with_cosine_annealing``."""
    optimizer = _adam(
        precision, adam_beta1, adam_beta2, adam_eps, weight_decay, max_lr, min_lr, clip_grad
    )
    warmup: dict[str, Any] = {}
    if lr_warmup_samples is not None:
        warmup["lr_warmup_samples"] = lr_warmup_samples
    scheduler = SchedulerConfig(
        lr_decay_style="cosine", lr_decay_samples=lr_decay_samples, **warmup
    )
    return optimizer, scheduler


def _adam(
    precision: str,
    adam_beta1: float,
    adam_beta2: float,
    adam_eps: float,
    weight_decay: float,
    max_lr: float,
    min_lr: float | None,
    clip_grad: float,
) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=max_lr,
        min_lr=0.1 * max_lr if min_lr is None else min_lr,
        weight_decay=weight_decay,
        adam_beta1=adam_beta1,
        adam_beta2=adam_beta2,
        adam_eps=adam_eps,
        clip_grad=clip_grad,
        use_distributed_optimizer=True,
        bf16=precision == "bf16-mixed",
        fp16=precision == "16-mixed",
    )


def distributed_muon_with_cosine_annealing(
    precision: str = "bf16-mixed",
    muon_momentum: float = 0.95,
    muon_use_nesterov: bool = True,
    muon_scale_mode: str = "spectral",
    muon_fp32_matmul_prec: str = "medium",
    muon_num_ns_steps: int = 5,
    muon_tp_mode: str = "blockwise",
    muon_extra_scale_factor: float = 1.0,
    lr_warmup_iters: int = 2000,
    lr_decay_iters: int = 2000,
    weight_decay: float = 0.1,
    max_lr: float = 1e-4,
    min_lr: float | None = None,
    clip_grad: float = 1.0,
    **others: Any,
) -> Optimization:
    """Return Muon with a distributed state, and its schedule in steps.

    Args:
        precision: As for ``distributed_fused_adam_with_cosine_annealing``, as are the learning rate's.
        muon_momentum: Momentum of the orthogonalized update.
        muon_use_nesterov: Whether momentum is Nesterov's.
        muon_scale_mode: How the update is scaled.
        muon_fp32_matmul_prec: Precision of fp32 products of the iteration.
        muon_num_ns_steps: Newton-Schulz steps.
        muon_tp_mode: How weights that are sharded by tensor parallelism are orthogonalized.
        muon_extra_scale_factor: Factor of the update.
        lr_warmup_iters: Steps during which the learning rate increases.
        lr_decay_iters: Steps until ``min_lr``.
        weight_decay: Factor of weight decay.
        max_lr: Peak learning rate.
        min_lr: Final learning rate; None is 0.
        clip_grad: Largest norm of the gradient.
        **others: More fields of ``OptimizerConfig``, such as ``muon_scalar_optimizer``.
    """
    optimizer = OptimizerConfig(
        optimizer="dist_muon",
        lr=max_lr,
        min_lr=min_lr,
        weight_decay=weight_decay,
        clip_grad=clip_grad,
        bf16=precision == "bf16-mixed",
        fp16=precision == "16-mixed",
        muon_momentum=muon_momentum,
        muon_nesterov=muon_use_nesterov,
        muon_scale_mode=muon_scale_mode,
        muon_fp32_matmul_prec=muon_fp32_matmul_prec,
        muon_num_ns_steps=muon_num_ns_steps,
        muon_tp_mode=muon_tp_mode,
        muon_extra_scale_factor=muon_extra_scale_factor,
        **others,
    )
    scheduler = SchedulerConfig(
        lr_decay_style="cosine", lr_warmup_iters=lr_warmup_iters, lr_decay_iters=lr_decay_iters
    )
    return optimizer, scheduler
