# SPDX-License-Identifier: Apache-2.0
"""Values that a config leaves open, filled in from the others.

Each function fills only what is None, or what it alone owns, and says what it changed that somebody may have set.
A value that contradicts another one is a problem, never replaced. Running it twice changes nothing more.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.optimizer import HAVE_EMERGING_OPTIMIZERS

from megatron.bridge.backends import layer_specs, megatron_fsdp
from megatron.bridge.training.batch_size import BatchSize
from megatron.bridge.training.comm_overlap import derive_overlap
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.mixed_precision import (
    MODEL_FIELDS,
    MixedPrecisionConfig,
    get_mixed_precision_config,
    lack,
)
from megatron.bridge.utils.errors import UserError

# What Megatron-Core can compute again one by one: by throwing the output away, and as checkpoints of torch.
RECOMPUTED_BY_ENGINE = ("layernorm", "mla_up_proj", "moe_act", "gdn_norm_out")
RECOMPUTED_BY_TORCH = ("core_attn", "mlp", "moe", "shared_experts")

# What only its layers do, and what to do without.
NEEDS_ENGINE = {
    "tp_comm_overlap": "switch it off",
    "delay_wgrad_compute": "switch it off",
    "cpu_offloading": "recompute instead, with model.recompute_granularity=full",
    "fine_grained_activation_offloading": "recompute instead, with model.recompute_granularity=selective",
}


@dataclass
class Findings:
    """What resolving found.

    Attributes:
        notes: Replaced values, for the console.
        problems: Contradictions, for one error message.
    """

    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def resolve(config: ConfigContainer, world_size: int, here: bool) -> Findings:
    """Fill in what is derived, for ``world_size`` processes on this machine (``here``) or on another."""
    findings = Findings()
    _precision(config, findings)
    _quantisation(config, here, findings)
    _recomputed(config, here, findings)
    _muon(config, here, findings)
    _distributed_optimizer(config, world_size, findings)
    _megatron_fsdp(config)
    findings.problems += derive_overlap(config, world_size)
    _param_gather(config, findings)
    _engine(config, here, findings)
    _interleaved_messages(config, findings)
    _length(config, findings)
    _schedule(config, findings)
    _folders(config)
    return findings


def _agree(owner: Any, prefix: str, name: str, value: Any, why: str, findings: Findings) -> None:
    """Set ``owner.name`` unless it is set; a different value is a problem."""
    current = getattr(owner, name)
    if current is None:
        setattr(owner, name, value)
    elif current != value:
        findings.problems.append(
            f"{prefix}.{name}={current} contradicts {why}, which asks for {value}: remove one of them"
        )


def _precision(config: ConfigContainer, findings: Findings) -> None:
    try:
        precision = _chosen_precision(config)
    except UserError as error:
        findings.problems.append(str(error))
        return
    dtype = _own_dtype(precision)
    why = "the model's precision" if config.mixed_precision is None else "mixed_precision"
    if config.model.params_dtype not in (torch.float32, _own_dtype(config.model), dtype):
        findings.problems.append(
            f"model.params_dtype={config.model.params_dtype} contradicts {why}, which asks for {dtype}: remove it"
        )
    _own_model_precision(config, precision, findings)
    for name, value in (("bf16", precision.bf16), ("fp16", precision.fp16), ("params_dtype", dtype)):
        _agree(config.optimizer, "optimizer", name, value, why, findings)
    for name in ("params_dtype", "pipeline_dtype"):
        if getattr(precision, name) not in (None, dtype):
            findings.problems.append(
                f"mixed_precision.{name}={getattr(precision, name)} contradicts the precision flags, "
                f"which ask for {dtype}: remove it"
            )
    _own_grad_reduce(config, precision, findings)


def _own_dtype(flags: Any) -> torch.dtype:
    """What the precision flags of a model, or of a precision, ask for."""
    return torch.bfloat16 if flags.bf16 else torch.float16 if flags.fp16 else torch.float32


def _chosen_precision(config: ConfigContainer) -> MixedPrecisionConfig:
    if config.mixed_precision is not None:
        return get_mixed_precision_config(config.mixed_precision)
    model = config.model
    own: dict[str, Any] = {name: getattr(model, name) for name in MODEL_FIELDS}
    return MixedPrecisionConfig(bf16=model.bf16, fp16=model.fp16, grad_reduce_in_fp32=not model.fp16, **own)


def _own_model_precision(config: ConfigContainer, precision: MixedPrecisionConfig, findings: Findings) -> None:
    model = config.model
    for name in ("bf16", "fp16", *MODEL_FIELDS):
        before, after = getattr(model, name), getattr(precision, name)
        if before and not after:
            findings.notes.append(f"model.{name}={before} gives way to mixed_precision, which asks for {after}")
        setattr(model, name, after)
    if not (precision.bf16 or precision.fp16):
        model.params_dtype = torch.float32


def _quantisation(config: ConfigContainer, here: bool, findings: Findings) -> None:
    """A machine that cannot multiply in the format would compute in another one without a word."""
    if not (config.model.fp8 or config.model.fp4):
        return
    scaling = config.model.fp8_recipe if config.model.fp8 else config.model.fp4_recipe
    config.optimizer.fp8_recipe = config.model.fp8_recipe if config.model.fp8 else None
    missing = lack(scaling)
    if missing is None:
        return
    name = config.mixed_precision if isinstance(config.mixed_precision, str) else scaling
    if here:
        findings.problems.append(f"mixed_precision={name} needs {missing}: use bf16_mixed, or such a machine")
    else:
        findings.notes.append(f"mixed_precision={name} needs {missing}: the run must have it")


def _recomputed(config: ConfigContainer, here: bool, findings: Findings) -> None:
    """Megatron-Core 0.19 asks Transformer Engine for its state whenever an output is thrown away.

    Without it that is a ``NameError`` in the first step.
    """
    model = config.model
    chosen = (model.recompute_modules or ()) if model.recompute_granularity == "selective" else ()
    names = [name for name in chosen if name in RECOMPUTED_BY_ENGINE]
    if names and not layer_specs.has_transformer_engine():
        others = ", ".join(RECOMPUTED_BY_TORCH)
        _lacking(
            f"model.recompute_modules={', '.join(names)} needs Transformer Engine, which is not installed",
            f"take {others} instead, or model.recompute_granularity=full",
            here,
            findings,
        )


def _engine(config: ConfigContainer, here: bool, findings: Findings) -> None:
    """What only Transformer Engine's layers do; others would leave it out, or fail in the first step."""
    model = config.model
    used = {name: instead for name, instead in NEEDS_ENGINE.items() if getattr(model, name)}
    if not used or layer_specs.resolve_backend(model.backend) == "transformer_engine":
        return
    why = "but model.backend is torch" if layer_specs.has_transformer_engine() else "which is not installed"
    for name, instead in used.items():
        _lacking(f"model.{name}=True needs Transformer Engine, {why}", instead, here, findings)


def _muon(config: ConfigContainer, here: bool, findings: Findings) -> None:
    if config.optimizer.optimizer == "muon" and not HAVE_EMERGING_OPTIMIZERS:
        _lacking(
            "optimizer.optimizer=muon needs the package emerging-optimizers, which is not installed",
            "install it (pip install 'hf-megatron-bridge[muon]'), or use adam",
            here,
            findings,
        )


def _lacking(what: str, instead: str, here: bool, findings: Findings) -> None:
    """This machine cannot; another may."""
    if here:
        findings.problems.append(f"{what}: {instead}")
    else:
        findings.notes.append(f"{what}: the run must have it")


def without_quantisation(model: Any) -> Any:
    """A copy that Megatron-Core checks on a machine without Transformer Engine."""
    plain = copy.copy(model)
    plain.fp8 = plain.fp4 = None
    return plain


def _own_grad_reduce(config: ConfigContainer, precision: MixedPrecisionConfig, findings: Findings) -> None:
    ddp = config.ddp
    if ddp.grad_reduce_in_fp32 is None:
        ddp.grad_reduce_in_fp32 = precision.grad_reduce_in_fp32
    elif config.mixed_precision is not None and ddp.grad_reduce_in_fp32 != precision.grad_reduce_in_fp32:
        # a recipe is a bundle of defaults: what was set beside it wins, and is shown
        findings.notes.append(
            f"ddp.grad_reduce_in_fp32={ddp.grad_reduce_in_fp32} is used instead of mixed_precision's "
            f"{precision.grad_reduce_in_fp32}"
        )


def _distributed_optimizer(config: ConfigContainer, world_size: int, findings: Findings) -> None:
    optimizer, ddp = config.optimizer, config.ddp
    chosen = ddp.use_distributed_optimizer
    if chosen is None:
        chosen = optimizer.use_distributed_optimizer
    if chosen is None and optimizer.optimizer != "adam":
        chosen = False  # Megatron-Core cuts the state into intervals, which have no shape
    if chosen is None and config.dist.use_torch_fsdp2:
        chosen = False  # the state is cut with the weights
    if chosen is None and config.ddp.use_megatron_fsdp:
        chosen = True  # what updates the weights that it cut
    if chosen is None:
        # context-parallel ranks hold the same weights: they share the state like data-parallel ones
        replicas = config.data_parallel_size(world_size) * config.model.context_parallel_size
        chosen = replicas > 1
    _agree(ddp, "ddp", "use_distributed_optimizer", chosen, "optimizer.use_distributed_optimizer", findings)
    _agree(optimizer, "optimizer", "use_distributed_optimizer", chosen, "ddp.use_distributed_optimizer", findings)


def _megatron_fsdp(config: ConfigContainer) -> None:
    """What it cuts; it reduces and gathers beside the computation."""
    ddp = config.ddp
    if ddp.use_megatron_fsdp:
        ddp.overlap_grad_reduce = ddp.overlap_param_gather = True
    if ddp.data_parallel_sharding_strategy is None:
        ddp.data_parallel_sharding_strategy = megatron_fsdp.ALL if ddp.use_megatron_fsdp else megatron_fsdp.NOTHING


def _param_gather(config: ConfigContainer, findings: Findings) -> None:
    """The optimizer has a copy of the switch."""
    name = "overlap_param_gather"
    _agree(config.optimizer, "optimizer", name, config.ddp.overlap_param_gather, f"ddp.{name}", findings)


def _interleaved_messages(config: ConfigContainer, findings: Findings) -> None:
    """Two stages with virtual pipelining must overlap their messages.

    With two stages the previous and the next rank are one process, and batched sends match receives in the order
    of posting: the wrong activations arrive, without an error (loss off by 3e-3, gradient norm by 5e-2).
    """
    model = config.model
    virtual = (model.virtual_pipeline_model_parallel_size or 1) > 1
    if virtual and model.pipeline_model_parallel_size == 2 and not model.overlap_p2p_comm:
        model.overlap_p2p_comm, model.batch_p2p_comm = True, False
        findings.notes.append(
            "model.overlap_p2p_comm=True and model.batch_p2p_comm=False are used: batched messages between two "
            "pipeline stages with virtual stages arrive in the wrong order"
        )


def _length(config: ConfigContainer, findings: Findings) -> None:
    train = config.train
    if train.train_samples is None:
        return
    steps = BatchSize(train).steps_within(train.train_samples)
    if steps == 0:
        findings.problems.append(
            f"train.train_samples={train.train_samples} are not enough for one step: raise it, or lower "
            f"train.global_batch_size={train.global_batch_size}"
        )
    if train.train_iters not in (0, steps):  # a recipe's; one that was typed would not stick, and is refused
        findings.notes.append(
            f"train.train_iters={train.train_iters} gives way to train.train_samples={train.train_samples}, which "
            f"are {steps} steps"
        )
    train.train_iters = steps


def _schedule(config: ConfigContainer, findings: Findings) -> None:
    scheduler, optimizer = config.scheduler, config.optimizer
    steps, warmup = config.train.train_iters, scheduler.lr_warmup_iters
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


def _folders(config: ConfigContainer) -> None:
    if config.logger.log_dir is None:
        config.logger.log_dir = config.checkpoint.save
