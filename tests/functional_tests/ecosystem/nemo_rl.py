# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's calls of its plain path, in their order and with their keywords, on a toy model."""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.bridge.training.model_load_save import (
    load_model_config,
    temporary_distributed_context,
)
from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer
from megatron.bridge.training.utils.flop_utils import num_floating_point_operations
from megatron.bridge.training.utils.pg_utils import get_pg_collection
from megatron.bridge.training.utils.train_utils import (
    create_value_head_hook,
    logical_and_across_model_parallel_group,
    reduce_max_stat_across_model_parallel_group,
)
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import destroy_rerun_state_machine, get_rerun_state_machine
from megatron.core.transformer.module import Float16Module

from megatron.bridge import AutoBridge
from megatron.bridge.models.model_provider import get_model
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.checkpointing import (
    checkpoint_exists,
    init_checkpointing_context,
    load_checkpoint,
    maybe_finalize_async_save,
    save_checkpoint,
)
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
)
from megatron.bridge.training.initialize import initialize_megatron, set_jit_fusion_options
from megatron.bridge.training.optim import setup_optimizer
from megatron.bridge.training.setup import _create_peft_pre_wrap_hook, _update_model_config_funcs
from megatron.bridge.training.state import GlobalState

BATCH = 4


def import_model(directory, path, tensor_parallel):
    """community_import.import_model_from_hf_name."""
    bridge = AutoBridge.from_hf_pretrained(str(directory), trust_remote_code=True)
    provider = bridge.to_megatron_provider(load_weights=True)
    provider.tensor_model_parallel_size = tensor_parallel
    provider.pipeline_dtype = torch.float32
    provider.gradient_accumulation_fusion = False
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    model = provider.provide_distributed_model(wrap_with_ddp=False, post_wrap_hook=None)
    bridge.save_megatron_model(model, str(path))
    destroy_rerun_state_machine()
    mpu.destroy_model_parallel()


def container(directory, pretrained, weights, tensor_parallel, async_save, **ddp):
    """setup.setup_model_config and ConfigContainer.validate of the worker."""
    model, _ = load_model_config(str(pretrained / "iter_0000000"))
    model.tensor_model_parallel_size = tensor_parallel
    model.expert_tensor_parallel_size = 1
    model.bf16, model.fp16, model.params_dtype = False, False, torch.float32
    model.parallel_output = model.calculate_per_token_loss = model.perform_initialization = True
    model.__post_init__()
    save = weights or (str(pretrained) if async_save else None)
    config = ConfigContainer(
        model=model,
        checkpoint=CheckpointConfig(
            save_interval=100,
            save=save,
            load=weights,
            load_optim=weights is not None,
            pretrained_checkpoint=str(pretrained),
            fully_parallel_save=True,
            fully_parallel_load=True,
            load_rng=False,
            load_main_params_from_ckpt=False,
            async_save=async_save,
            ckpt_assume_constant_structure=True,
        ),
        logger=LoggerConfig(logging_level=0),
        dist=DistributedInitConfig(use_gloo_process_groups=False),
        train=TrainingConfig(micro_batch_size=1, global_batch_size=BATCH, train_iters=10),
        optimizer=OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            min_lr=1e-3,
            weight_decay=0.01,
            bf16=False,
            fp16=False,
            params_dtype="float32",
            use_distributed_optimizer=True,
            clip_grad=1.0,
            overlap_param_gather=True,
        ),
        ddp=DistributedDataParallelConfig(
            check_for_nan_in_grad=True,
            grad_reduce_in_fp32=False,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            average_in_collective=False,
            use_distributed_optimizer=True,
            data_parallel_sharding_strategy="optim_grads_params",
        ),
        scheduler=SchedulerConfig(
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            lr_decay_style="constant",
            lr_decay_iters=1000,
            lr_warmup_iters=2,
            lr_warmup_init=1e-3,
        ),
        dataset=None,
        tokenizer=TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(directory)
        ),
    )
    config.validate()
    return config


def build(config, lora, extra_hooks=()):
    """setup.setup_model_and_optimizer and finalize_megatron_setup."""
    state = GlobalState()
    state.cfg = config
    state.initialize_async_checkpoint_worker()
    config.dist.external_gpu_device_mapping = True
    initialize_megatron(cfg=config, get_embedding_ranks=None, get_position_embedding_ranks=None)
    set_jit_fusion_options(config.model, config.train.micro_batch_size)
    context = init_checkpointing_context(config.checkpoint)
    config.tokenizer.trust_remote_code = True
    tensor_parallel = config.model.tensor_model_parallel_size
    tokenizer = build_tokenizer(
        config.tokenizer,
        make_vocab_size_divisible_by=config.model.make_vocab_size_divisible_by // tensor_parallel,
        tensor_model_parallel_size=tensor_parallel,
    )
    assert tokenizer.padded_vocab_size >= config.model.vocab_size
    resumes = config.checkpoint.load is not None and checkpoint_exists(config.checkpoint.load)
    hooks = list(extra_hooks)
    if lora:
        names = ["linear_qkv", "linear_fc1"]
        config.peft = LoRA(names, [], dim=4, alpha=8, a2a_experimental=False, lora_dtype=None)
        hook = _create_peft_pre_wrap_hook(config, state)
        config.model.register_pre_wrap_hook(hook)
        hooks.append(partial(hook))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config.model._pg_collection = groups
    model = get_model(
        config.model,
        config.ddp,
        use_torch_fsdp2=config.dist.use_torch_fsdp2,
        overlap_param_gather_with_optimizer_step=config.optimizer.overlap_param_gather_with_optimizer_step,
        data_parallel_random_init=config.rng.data_parallel_random_init,
        pre_wrap_hook=hooks,
        mixed_precision_wrapper=Float16Module,
        pg_collection=groups,
        wrap_with_ddp=True,
    )
    optimizer, scheduler = setup_optimizer(
        optimizer_config=config.optimizer,
        scheduler_config=config.scheduler,
        model=model,
        use_gloo_process_groups=config.dist.use_gloo_process_groups,
    )
    if lora:
        config.checkpoint.finetune = False
    if resumes or not lora:
        load_checkpoint(
            state,
            model,
            optimizer,
            scheduler,
            checkpointing_context=context,
            skip_load_to_model_and_opt=False,
        )
        assert config.checkpoint.finetune is not resumes
    _update_model_config_funcs(
        model, config.model, config.ddp, optimizer, align_grad_reduce=False, pg_collection=groups
    )
    return state, model[0], optimizer, scheduler, context


def train_step(step, state, model, optimizer, scheduler):
    """megatron_policy_worker.train, with a sum over tokens as the loss."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 104, (BATCH, 16), generator=generator)
    mine = ids[mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()]

    def forward_step(iterator, chunk):
        batch = next(iterator)
        with state.straggler_timer():
            output = chunk(
                input_ids=batch, position_ids=torch.arange(16)[None], attention_mask=None
            )
        return output, partial(loss, batch)

    def loss(batch, output):
        value = output.float().square().sum() / (BATCH * 16)
        value = value * len(mine)  # the schedule divides by it
        return value, {"loss": value.detach()}

    machine, batches = get_rerun_state_machine(), iter(mine.split(1))
    while machine.should_run_forward_backward(batches):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=model,
            num_microbatches=len(mine),
            seq_length=16,
            micro_batch_size=1,
            forward_only=False,
        )
    updated, norm, zeros = optimizer.step()
    groups = get_pg_collection(model)
    assert logical_and_across_model_parallel_group(updated, mp_group=groups.mp)
    norm = reduce_max_stat_across_model_parallel_group(norm, mp_group=groups.mp)
    assert reduce_max_stat_across_model_parallel_group(zeros, mp_group=groups.mp) is None
    scheduler.step(increment=BATCH)
    return norm


def save(state, model, optimizer, scheduler, context, weights):
    """megatron_policy_worker.save_checkpoint."""
    checkpoint = state.cfg.checkpoint
    before, checkpoint.save = checkpoint.save, str(weights)
    maybe_finalize_async_save(state, ckpt_cfg=checkpoint, blocking=True)
    model.disable_forward_pre_hook()
    save_checkpoint(
        state=state,
        model=[model],
        optimizer=optimizer,
        opt_param_scheduler=scheduler,
        num_floating_point_operations_so_far=state.train_state.floating_point_operations_so_far,
        checkpointing_context=context,
    )
    maybe_finalize_async_save(state, ckpt_cfg=checkpoint, blocking=True)
    model.enable_forward_pre_hook()
    checkpoint.save = before


def weights_of(directory, model):
    """megatron_policy_worker: refit through conversion tasks."""
    bridge = AutoBridge.from_hf_pretrained(str(directory), trust_remote_code=True)
    tasks = [task for task in bridge.get_conversion_tasks([model]) if task is not None]
    assert all(task.mapping.tp_size == mpu.get_tensor_model_parallel_world_size() for task in tasks)
    model.disable_forward_pre_hook()
    items = bridge.export_hf_weights([model], show_progress=False, conversion_tasks=tasks)
    found = {name: weight.clone() for name, weight in items}
    model.enable_forward_pre_hook()
    return found


def replay(directory, out, tensor_parallel, lora, async_save=False):
    """Import, train two steps, save, train one; resume and train the same one: norms and weights of both."""
    directory, out = Path(directory), Path(out)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    import_model(directory, out / "base", tensor_parallel)
    config = container(directory, out / "base", None, tensor_parallel, async_save)
    state, model, optimizer, scheduler, context = build(config, lora)
    imported = weights_of(directory, model)
    assert num_floating_point_operations(config, batch_size=1) > 0
    norms = [train_step(step, state, model, optimizer, scheduler) for step in range(2)]
    save(state, model, optimizer, scheduler, context, out / "weights")
    norms.append(train_step(2, state, model, optimizer, scheduler))
    went_on = weights_of(directory, model)
    mpu.destroy_model_parallel()
    config = container(directory, out / "base", str(out / "weights"), tensor_parallel, async_save)
    state, model, optimizer, scheduler, _ = build(config, lora)
    again = train_step(2, state, model, optimizer, scheduler)
    resumed = weights_of(directory, model)
    assert again == norms[2]
    assert all(torch.equal(resumed[name], weight) for name, weight in went_on.items())
    mpu.destroy_model_parallel()
    return norms, imported, went_on


def replay_critic(directory, out, tensor_parallel):
    """megatron_value_worker: a head that base checkpoints lack, saved and resumed with the rest."""
    directory, out = Path(directory), Path(out)
    import_model(directory, out / "base", tensor_parallel)
    sums = []
    for weights in (None, str(out / "weights")):
        config = container(directory, out / "base", weights, tensor_parallel, False)
        config.model.share_embeddings_and_output_weights = False
        state, model, optimizer, scheduler, context = build(
            config, False, [partial(value_head, config.model)]
        )
        sums.append({name: value.double().sum().item() for name, value in model.named_parameters()})
        if weights is None:
            train_step(0, state, model, optimizer, scheduler)
            save(state, model, optimizer, scheduler, context, out / "weights")
            sums.append(
                {name: value.double().sum().item() for name, value in model.named_parameters()}
            )
        mpu.destroy_model_parallel()
    assert sums[1] == sums[2] != sums[0]
    return sums


def value_head(provider, model):
    """make_value_head_hook: the chunk can hide its head while base weights are loaded."""
    from contextlib import contextmanager

    model = create_value_head_hook(
        hidden_size=provider.hidden_size, sequence_parallel=provider.sequence_parallel
    )(model)
    for chunk in model:
        original, hidden = chunk.sharded_state_dict, []

        def sharded_state_dict(*args, original=original, hidden=hidden, **options):
            state = original(*args, **options)
            return {
                key: value
                for key, value in state.items()
                if not (hidden and key.startswith("output_layer."))
            }

        @contextmanager
        def hide_loss_modules(hidden=hidden):
            hidden.append(True)
            yield
            hidden.clear()

        chunk.sharded_state_dict, chunk.hide_loss_modules = sharded_state_dict, hide_loss_modules
    return model


def convert_to_hf(directory, iteration, out):
    """community_import.export_model_from_megatron, in a process without groups."""
    bridge = AutoBridge.from_hf_pretrained(str(directory), trust_remote_code=True)
    with temporary_distributed_context(backend="gloo"):
        model = bridge.load_megatron_model(str(iteration), skip_temp_dist_context=True)
        bridge.save_hf_pretrained(model, str(out), strict=True)
