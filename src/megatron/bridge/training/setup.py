# SPDX-License-Identifier: Apache-2.0
"""From a config to a run that stands where it shall go on."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config

from megatron.bridge.backends import allocator, user_buffers
from megatron.bridge.data.loaders import Iterators, build_iterators
from megatron.bridge.data.tokenizer import Tokenizer, build_tokenizer
from megatron.bridge.training import fault_tolerance
from megatron.bridge.training.adapters import adapting_hook
from megatron.bridge.training.batch_size import samples_of
from megatron.bridge.training.callbacks.base import Callback, CallbackManager
from megatron.bridge.training.callbacks.defaults import default_callbacks
from megatron.bridge.training.checkpointing import find_source, load_run
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.evaluation import per_chunk
from megatron.bridge.training.forward_step import adapt, returns_schedule_plan, takes_state
from megatron.bridge.training.freezing import freezing_hook
from megatron.bridge.training.optimizer import build_optimizer
from megatron.bridge.training.parallel_layout import Layout
from megatron.bridge.training.random_states import seed_everything
from megatron.bridge.training.scheduler import build_scheduler
from megatron.bridge.training.state import Run
from megatron.bridge.utils import dist as process
from megatron.bridge.utils.config import origins
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError

Callbacks = Iterable[Callback] | CallbackManager


def setup(config: ConfigContainer, forward_step: Callable[..., Any], callbacks: Callbacks | None = None) -> Run:
    """Check the config, build everything, and load the checkpoint to go on from, if there is one.

    Args:
        config: What to run; it is resolved in place.
        forward_step: A forward step in one of the forms of ``training.forward_step``.
        callbacks: The user's callbacks; they run after logging and evaluation and before saving.

    Returns:
        A run for ``training.loop.train``.

    Raises:
        UserError: the config, the forward step, the data or the checkpoint cannot be used.
    """
    check_forward_step(forward_step, config)
    config.dataset.check_sources()  # first, because a tokenizer may have to be fetched
    tokenizer = build_tokenizer(config.tokenizer)
    validate(config, tokenizer.vocab_size)
    monitor = fault_tolerance.connect(config)
    initialize(config)
    source = find_source(config.checkpoint)  # what cannot be loaded is refused before the model is built
    model = build_model(config)
    optimizer = build_optimizer(config.optimizer, model)
    connect(model, optimizer, config)
    run = Run(
        config=config,
        model=model,
        optimizer=optimizer,
        scheduler=build_scheduler(config, optimizer),
        tokenizer=tokenizer,
        forward_step=forward_step,
        callbacks=default_callbacks(config, callbacks or (), monitor),
    )
    run.forward_step = adapt(forward_step, run)
    load_run(run, source)
    run.data = build_data(config, tokenizer, run.progress.consumed_train_samples)
    if run.data.train is not None:
        run.train_batches = per_chunk(run.data.train, len(model))
    return run


def check_forward_step(step: Callable[..., Any], config: ConfigContainer) -> None:
    """Refuse a forward step that cannot be called, or cannot do what the config needs."""
    takes_state(step)
    if config.model.overlap_moe_expert_parallel_comm and not returns_schedule_plan(step):
        raise UserError(
            "model.overlap_moe_expert_parallel_comm=True needs a forward step with the parameter "
            "return_schedule_plan=False: add it, or switch the overlap off"
        )
    if config.distill is not None and not getattr(step, "learns_from_teacher", False):
        raise UserError(
            "distill is set, but pretrain and finetune learn from the data alone: use `--mode distill`, or "
            "megatron.bridge.training.distill.distill, or unset it"
        )


def validate(config: ConfigContainer, vocab_size: int) -> None:
    """Validate the config for this job and tell what was replaced."""
    origins.ensure(config, "script")
    before = origins.values(config)
    if config.model.vocab_size is None:
        config.model.vocab_size = vocab_size
    notes = config.validate()
    origins.mark_derived(config, before)
    if vocab_size > config.model.padded_vocab_size:
        raise UserError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the tokenizer's {vocab_size}: use the "
            "model's own tokenizer, or leave model.vocab_size unset"
        )
    for note in notes:
        console().print(f"note: {note}", markup=False)


def initialize(config: ConfigContainer) -> None:
    """Join the process group, create the model-parallel groups, seed everything."""
    allocator.keep_freed_memory()
    process.initialize(config.dist.distributed_backend, config.dist.distributed_timeout_minutes)
    if parallel_state.model_parallel_is_initialized():
        _check_existing_groups(config)
    else:
        instances = config.ddp.num_distributed_optimizer_instances
        config.model.initialize_model_parallel(num_distributed_optimizer_instances=instances)
    if config.model.tp_comm_overlap:
        tokens = config.dataset.seq_length * config.train.micro_batch_size // config.model.context_parallel_size
        settings = config.comm_overlap.tp_comm_overlap_cfg if config.comm_overlap else None
        user_buffers.start(config.model, tokens, settings)
    seed_everything(config.rng)


def _check_existing_groups(config: ConfigContainer) -> None:
    existing, wanted = asdict(Layout.current()), asdict(Layout.of(config.model))
    differing = [
        f"{name} parallel size {size}, not {wanted[name]}"
        for name, size in existing.items()
        if size != wanted[name]
    ]
    if differing:
        raise UserError(
            f"this process has groups for {', '.join(differing)} as the config asks for: call "
            "parallel_state.destroy_model_parallel() between the two runs"
        )


def build_model(config: ConfigContainer) -> list[MegatronModule]:
    """The chunks of this rank, wrapped for data parallelism."""
    return config.model.provide_distributed_model(
        # Megatron-Core writes the bucket size that it used into the config it is given
        ddp_config=copy.copy(config.ddp),
        pre_wrap_hook=freezing_hook(config.train.frozen, adapting_hook(config)),
        data_parallel_random_init=config.rng.data_parallel_random_init,
        use_torch_fsdp2=config.dist.use_torch_fsdp2,
    )


def connect(model: list[MegatronModule], optimizer: MegatronOptimizer, config: ConfigContainer) -> None:
    """Give Megatron-Core's schedules the functions of optimizer and data parallelism that they call."""
    hooks = get_model_config(model[0])
    hooks.grad_scale_func = optimizer.scale_loss
    hooks.finalize_model_grads_func = finalize_model_grads
    chunks = [chunk for chunk in model if isinstance(chunk, _BaseDataParallel)]
    assert len(chunks) == len(model), "a chunk is not wrapped for data parallelism"
    if config.ddp.overlap_grad_reduce:
        hooks.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
    if config.ddp.overlap_param_gather and config.ddp.align_param_gather:
        hooks.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in chunks])


def _one_or_all(functions: list[Any]) -> Any:
    """The schedules take a function, or with virtual stages a list of one per chunk."""
    return functions[0] if len(functions) == 1 else functions


def build_data(config: ConfigContainer, tokenizer: Tokenizer, consumed: int = 0) -> Iterators:
    """The data of this rank, training positioned behind ``consumed`` samples of all ranks."""
    batch = config.train.global_batch_size
    held_out = config.validation.eval_iters * batch
    return build_iterators(
        config.dataset,
        tokenizer,
        (samples_of(config.train), held_out, held_out),
        config.train.micro_batch_size,
        batch,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        consumed_train=consumed,
    )
