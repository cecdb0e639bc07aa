# SPDX-License-Identifier: Apache-2.0
"""Build a run from a config, positioned where it should start or resume."""

import copy
import logging
import os
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.utils import get_model_config

from megatron.bridge.backends.attention.shared_sequences import follow_groups_of_rows
from megatron.bridge.backends.cpu import allocator
from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.backends.hardware import user_buffers
from megatron.bridge.data.config import DatasetConfig
from megatron.bridge.data.loaders import DataIterator, Iterators, build_iterators
from megatron.bridge.data.media.processor_files import chat_template
from megatron.bridge.data.records.chat_template import template_text
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer, Tokenizer, build_tokenizer
from megatron.bridge.models.vision.sharing import rank_share
from megatron.bridge.training.callbacks.base import Callback, CallbackManager
from megatron.bridge.training.callbacks.defaults import default_callbacks
from megatron.bridge.training.checkpointing.save_load import find_starting_point, load_run
from megatron.bridge.training.config import ConfigContainer, Resolved
from megatron.bridge.training.config.batch_size import EvaluationBatch, evaluation_batch, samples_of
from megatron.bridge.training.config.resolve.context_sharing import context_sharing
from megatron.bridge.training.config.resolve.data import tuning_parts, validation_sets
from megatron.bridge.training.config.rules import VOCABULARY_RULES, violations
from megatron.bridge.training.evaluation import iterators_per_chunk
from megatron.bridge.training.initialize.freezing import freezing_hook
from megatron.bridge.training.initialize.peft import adapting_hook
from megatron.bridge.training.initialize.rank_state import (
    current_sizes,
    prepare_tracker,
    seed_everything,
    sizes_of,
)
from megatron.bridge.training.initialize.rounding import check_rounded_layers
from megatron.bridge.training.optim.optimizer import build_optimizer
from megatron.bridge.training.optim.scheduler import build_scheduler
from megatron.bridge.training.resiliency import fault_tolerance
from megatron.bridge.training.state import Run
from megatron.bridge.training.step.forward_step import (
    bind_state,
    returns_schedule_plan,
    takes_state,
)
from megatron.bridge.training.step.label_smoothing import smooth_labels
from megatron.bridge.utils import distributed, unpickling
from megatron.bridge.utils.config.origins import Origins
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.errors import UserError, refuse
from megatron.bridge.utils.optional_imports import lazy_names

Callbacks = Iterable[Callback] | CallbackManager
AnyConfig = ConfigContainer | Resolved[ConfigContainer]


def container_of(config: AnyConfig) -> ConfigContainer:
    """The config itself, resolved or not."""
    return config.config if isinstance(config, Resolved) else config


def resolve_run(config: AnyConfig, origins: Origins | None = None) -> Resolved[ConfigContainer]:
    """Resolve ``config`` for this job and build its tokenizer. A resolved config is returned unchanged."""
    if isinstance(config, Resolved):
        return config
    return add_tokenizer(config.resolve(origins=origins, count_rows=count_rows))


def count_rows(config: ConfigContainer) -> int:
    """The training rows of an epoch. All ranks must call this, because the first one fills ``prepared_dir``."""
    config.dataset.check_sources()
    tokenizer = build_tokenizer(config.tokenizer)
    if distributed.world_size() > 1:
        _connect_processes(config)
    return config.dataset.count_rows(tokenizer)


def add_tokenizer(resolved: Resolved[ConfigContainer]) -> Resolved[ConfigContainer]:
    """Build the tokenizer, and set ``model.vocab_size`` from it if it is unset."""
    config = resolved.config
    model = resolved.config.model
    config.dataset.check_sources()  # first, because the tokenizer may need a download
    for dataset in validation_sets(config).values():
        dataset.check_sources()
    tokenizer = build_tokenizer(config.tokenizer)
    if model.vocab_size is None:
        resolved.set_derived("model.vocab_size", tokenizer.vocab_size)
        refuse(violations(VOCABULARY_RULES, config, resolved.world_size))
    if tokenizer.vocab_size > model.padded_vocab_size:
        raise UserError(
            f"model.vocab_size={model.vocab_size} is smaller than the vocabulary of the tokenizer, "
            f"{tokenizer.vocab_size}: use the model's own tokenizer, or leave model.vocab_size unset"
        )
    return replace(resolved, tokenizer=tokenizer)


def setup(
    config: AnyConfig, forward_step: Callable[..., Any], callbacks: Callbacks | None = None
) -> Run:
    """Build all parts of a run, and load the checkpoint to resume from, if there is one.

    ``forward_step`` has one of the signatures of ``training.step.forward_step``; ``callbacks`` run after logging
    and evaluation and before saving.
    """
    check_forward_step(forward_step, container_of(config))
    resolved = resolve_run(config)
    config = resolved.config
    tokenizer = resolved.tokenizer
    for note in resolved.notes:
        print_rank_0(f"note: {note}")
    monitor = fault_tolerance.connect(config)
    initialize(config)
    unpickling.trust_checkpoints(config.checkpoint.trust_checkpoint)
    start = find_starting_point(config)  # refuses a damaged checkpoint before the model is built
    model = build_model(config)
    if config.train.label_smoothing:
        smooth_labels(model, config.train.label_smoothing)
    if config.train.skip_train:
        optimizer: MegatronOptimizer = ChainedOptimizer([])
    else:
        optimizer = build_optimizer(config.optimizer, model, config.dist.use_gloo_process_groups)
        connect(model, optimizer, config.ddp, config.dist.align_grad_reduce)
    run = Run(
        config=config,
        origins=resolved.origins,
        model=model,
        optimizer=optimizer,
        scheduler=build_scheduler(config, optimizer),
        tokenizer=tokenizer,
        forward_step=forward_step,
        callbacks=default_callbacks(config, callbacks or (), monitor),
        chat_template=trained_template(config, tokenizer),
    )
    run.forward_step = bind_state(forward_step, run)
    load_run(run, start)
    run.data = build_data(config, tokenizer, run.progress.consumed_train_samples)
    if run.data.train is not None:
        run.train_batches = iterators_per_chunk(run.data.train, len(model))
    return run


def trained_template(config: ConfigContainer, tokenizer: Any) -> str | None:
    """Return the chat template of a resolved config, unless it is that of the weights' own tokenizer.

    Returns:
        The text of the template; None if the data has none, or if its parts have different ones.
    """
    parts = tuning_parts(config.dataset)
    templates = {template_text(part.chat_template) for part in parts}
    if len(templates) > 1:
        print_rank_0(
            "note: the parts of the data have different chat templates, so checkpoints and exports keep that of "
            "the tokenizer: set dataset.chat_template in all parts to change that"
        )
        return None
    template = next(iter(templates), None)
    if template is not None or not parts or not isinstance(tokenizer, HuggingFaceTokenizer):
        return template
    is_of_weights = tokenizer.path == config.checkpoint.pretrained_checkpoint
    if is_of_weights and "chat_template" not in config.tokenizer.hf_tokenizer_kwargs:
        return None
    processor = parts[0].hf_processor_path
    of_processor = None if processor is None else chat_template(processor)
    in_use = of_processor or tokenizer.hf.chat_template
    return in_use if isinstance(in_use, str) else None


def check_forward_step(step: Callable[..., Any], config: ConfigContainer) -> None:
    """Refuse a forward step with an unknown signature or without a feature that the config needs."""
    takes_state(step)
    if config.model.overlap_moe_expert_parallel_comm and not returns_schedule_plan(step):
        raise UserError(
            "model.overlap_moe_expert_parallel_comm=True needs a forward step with the parameter "
            "return_schedule_plan=False: add the parameter, or turn the overlap off"
        )
    if config.distill is not None and not getattr(step, "learns_from_teacher", False):
        raise UserError(
            "distill is set, but pretrain and finetune train without a teacher: use `--mode distill` or "
            "megatron.bridge.training.distill.distill, or unset distill"
        )
    if config.dpo is not None and not getattr(step, "learns_preferences", False):
        raise UserError(
            "dpo is set, but pretrain and finetune train without a reference: use `--mode dpo` or "
            "megatron.bridge.training.dpo.dpo, or unset dpo"
        )
    if config.grpo is not None and not getattr(step, "learns_from_rewards", False):
        raise UserError(
            "grpo is set, but pretrain and finetune train without rewards: use `--mode grpo` or "
            "megatron.bridge.training.grpo.grpo, or unset grpo"
        )
    if config.model.hybrid_context_parallel and not getattr(step, "takes_shared_samples", False):
        raise UserError(
            "model.hybrid_context_parallel=True needs a forward step that splits each microbatch among the ranks that "
            "share it: use gpt_step, or one that calls its next_batch and packed_parameters, and give that the "
            "attribute takes_shared_samples=True"
        )
    if config.model.head is None and getattr(step, "has_losses_of_heads", False):
        raise UserError(
            "training.head_step is for models with a head, and model.head is not set: set it, or use gpt_step"
        )


def initialize(config: ConfigContainer, **groups: Any) -> None:
    """Join the process group, create the model-parallel ``groups``, and seed all random number generators."""
    allocator.keep_freed_memory()
    # Megatron-Core copies the scale of a step into it, and a backward pass by hand leaves one of another shape
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    if config.logger.logging_level is not None:
        logging.getLogger("megatron").setLevel(config.logger.logging_level)
    _connect_processes(config)
    if parallel_state.model_parallel_is_initialized():
        _check_existing_groups(config)
    else:
        config.model.initialize_model_parallel(
            num_distributed_optimizer_instances=config.ddp.num_distributed_optimizer_instances,
            distributed_timeout_minutes=config.dist.distributed_timeout_minutes,
            # gloo twins of NCCL's groups would never be used, and cannot connect nodes whose name is loopback
            create_gloo_process_groups=config.dist.use_gloo_process_groups,
            **groups,
        )
    if config.model.tp_comm_overlap:
        tokens = (
            config.dataset.seq_length
            * config.train.micro_batch_size
            // config.model.context_parallel_size
        )
        settings = config.comm_overlap.tp_comm_overlap_cfg if config.comm_overlap else None
        user_buffers.initialize_user_buffers(config.model, tokens, settings)
    prepare_tracker(config.model)
    seed_everything(config.rng)


def _connect_processes(config: ConfigContainer) -> None:
    if has_cuda():
        set_connections(config, torch.cuda.get_device_capability())
    device = torch.cuda.current_device() if config.dist.external_gpu_device_mapping else None
    distributed.initialize(config.dist.distributed_backend, config.dist.distributed_timeout_minutes)
    if device is not None:
        torch.cuda.set_device(device)


def _check_existing_groups(config: ConfigContainer) -> None:
    existing = current_sizes()
    needed = sizes_of(config.model)
    differing = [
        f"{name} parallel size {size}, not {needed[name]}"
        for name, size in existing.items()
        if size != needed[name]
    ]
    if config.model.hybrid_context_parallel and not _has_groups_of_samples():
        differing.append("no groups of ranks that share samples")
    if differing:
        raise UserError(
            f"this process has groups with {', '.join(differing)} as in the config: call "
            "parallel_state.destroy_model_parallel() between the two runs"
        )


def _has_groups_of_samples() -> bool:
    """Whether data-parallel ranks have the groups of ``model.hybrid_context_parallel``, of 2, 4, ... ranks."""
    try:
        parallel_state.get_hybrid_data_context_parallel_groups(group_size=2)
    except KeyError:
        return False
    return True


def build_model(config: ConfigContainer) -> list[MegatronModule]:
    """The chunks of this rank, wrapped for data parallelism."""
    hooks = (
        freezing_hook(config.train.frozen, adapting_hook(config)),
        partial(check_rounded_layers, config),
    )
    model = config.model.provide_distributed_model(
        # a copy, because Megatron-Core writes the bucket size into the config
        ddp_config=copy.copy(config.ddp),
        pre_wrap_hook=[hook for hook in hooks if hook is not None],
        data_parallel_random_init=config.rng.data_parallel_random_init,
        use_torch_fsdp2=config.dist.use_torch_fsdp2,
        wrap_with_ddp=needs_wrappers(config),
    )
    if config.model.hybrid_context_parallel:
        follow_groups_of_rows(model)
    return model


def needs_wrappers(config: ConfigContainer) -> bool:
    """Return whether chunks are wrapped for data parallelism; without training, only if that shards their weights."""
    shards_weights = config.dist.use_torch_fsdp2 or bool(config.ddp.use_megatron_fsdp)
    return shards_weights or not config.train.skip_train


def connect(
    model: list[MegatronModule], optimizer: MegatronOptimizer, ddp: Any, align_grad_reduce: bool
) -> None:
    """Set the functions of the optimizer and of data parallelism that Megatron-Core's schedules call."""
    hooks = get_model_config(model[0])
    hooks.grad_scale_func = optimizer.scale_loss
    hooks.finalize_model_grads_func = finalize_model_grads
    chunks = [chunk for chunk in model if isinstance(chunk, _BaseDataParallel)]
    assert len(chunks) == len(model), "a chunk is not wrapped for data parallelism"
    if ddp.overlap_grad_reduce:
        hooks.no_sync_func = _single_or_list([chunk.no_sync for chunk in chunks])
        if align_grad_reduce:
            hooks.grad_sync_func = _single_or_list([chunk.start_grad_sync for chunk in chunks])
    if ddp.overlap_param_gather and ddp.align_param_gather:
        hooks.param_sync_func = _single_or_list([chunk.start_param_sync for chunk in chunks])


def _single_or_list(functions: list[Any]) -> Any:
    """The schedules expect one function, or with virtual stages a list with one function per chunk."""
    return functions[0] if len(functions) == 1 else functions


def build_data(
    config: ConfigContainer,
    tokenizer: Tokenizer,
    consumed: int = 0,
    place: tuple[int, int] | None = None,
) -> Iterators:
    """The data of one data-parallel rank, by default this one, from where ``consumed`` samples of all ranks end."""
    share: tuple[int, int] | None = (0, 1)
    if place is None:
        place = (
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
        )
        # the tower is on the first stage
        share = (
            None if parallel_state.get_pipeline_model_parallel_rank() else rank_share(config.model)
        )

    def build(
        dataset: DatasetConfig, sizes: tuple[int, int, int], batch: EvaluationBatch
    ) -> Iterators:
        return build_iterators(
            dataset,
            tokenizer,
            sizes,
            micro_batch_size=batch.micro,
            global_batch_size=batch.total,
            dp_rank=place[0],
            dp_size=place[1],
            consumed_train=consumed,
            image_share=share,
            vocab_size=config.model.vocab_size,
            balance=config.train.rampup_batch_size is None,
            sharing=context_sharing(config),
        )

    train = config.train
    of_training = EvaluationBatch(train.micro_batch_size, train.global_batch_size)
    of_evaluation = evaluation_batch(config)
    count = samples_of(train)
    held_out = config.validation.eval_iters * of_evaluation.total
    valid_count = 0 if config.validation.sets else held_out
    if of_evaluation == of_training:
        data = build(config.dataset, (count, valid_count, held_out), of_training)
    else:
        data = build(config.dataset, (count, 0, 0), of_training)
        held_out_data = build(config.dataset, (0, valid_count, held_out), of_evaluation)
        data = data._replace(valid=held_out_data.valid, test=held_out_data.test)
    valid_sets: dict[str, DataIterator] = {}
    for name, dataset in validation_sets(config).items():
        batches = build(dataset, (0, held_out, 0), of_evaluation).valid
        if batches is None:
            raise UserError(
                f"validation.sets: {name} has no validation data: add it, or remove the set"
            )
        valid_sets[name] = batches
    return data._replace(valid_sets=valid_sets)


__getattr__ = lazy_names(
    __name__,
    {
        "_create_peft_pre_wrap_hook": "megatron.bridge.compat.training_calls:create_peft_pre_wrap_hook",
        "_update_model_config_funcs": "megatron.bridge.compat.training_calls:update_model_config_funcs",
    },
)


VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_MANY_STREAMS = (10, 0)  # from this compute capability on, Megatron-Core asks for no single queue


def needs_one_queue(config: ConfigContainer, capability: tuple[int, int]) -> bool:
    """Whether communication overlaps with computation only if kernels start in the order of their launches.

    Megatron-Core queues the communication of tensor and context parallelism first and counts on that order. Fully
    sharded parallelism and overlapped expert parallelism need several queues.
    """
    model = config.model
    shards = config.dist.use_torch_fsdp2 or bool(config.ddp.use_megatron_fsdp)
    splits = model.tensor_model_parallel_size > 1 or model.context_parallel_size > 1
    return (
        splits
        and not shards
        and not model.overlap_moe_expert_parallel_comm
        and capability < _MANY_STREAMS
    )


def set_connections(
    config: ConfigContainer,
    capability: tuple[int, int],
    environment: MutableMapping[str, str] = os.environ,
) -> None:
    """Set ``CUDA_DEVICE_MAX_CONNECTIONS`` for the layout, unless the user did; CUDA reads it when it starts."""
    if needs_one_queue(config, capability):
        environment.setdefault(VARIABLE, "1")
