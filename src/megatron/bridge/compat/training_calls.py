# SPDX-License-Identifier: Apache-2.0
"""The training layer in parts, for programs with loops of their own; docs/rl.md lists the public paths.

Set-up (process groups, adapters, optimizer, and what schedules call), and the checkpoints of a run, saved and loaded
in single calls.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from megatron.bridge.checkpoint import loading, model_io, paths, verification
from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.checkpoint.model_io import as_chunks
from megatron.bridge.models.conversion import pretrained
from megatron.bridge.models.hf_pretrained.hub import is_hf_model
from megatron.bridge.models.model_provider import refuse_other_groups, run_hooks
from megatron.bridge.peft.base import PEFT
from megatron.bridge.training import setup
from megatron.bridge.training.callbacks.base import CallbackManager
from megatron.bridge.training.checkpointing import save_load
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    OptimizerConfig,
    SchedulerConfig,
)
from megatron.bridge.training.initialize.peft import adapting_hook
from megatron.bridge.training.optim.optimizer import build_optimizer
from megatron.bridge.training.optim.optimizer_state import reload_main_weights
from megatron.bridge.training.optim.scheduler import schedule
from megatron.bridge.training.state import GlobalState, Run
from megatron.bridge.utils import unpickling
from megatron.bridge.utils.config.origins import Origins
from megatron.bridge.utils.errors import UserError

Chunks = list[MegatronModule]
EmbeddingRanks = Callable[..., list[int]] | None


def initialize_megatron(
    cfg: ConfigContainer,
    get_embedding_ranks: EmbeddingRanks = None,
    get_position_embedding_ranks: EmbeddingRanks = None,
) -> None:
    """Join the process group if it does not exist yet, make the model-parallel groups, and seed everything.

    The two functions choose the pipeline ranks that hold embeddings; None is Megatron-Core's choice.
    """
    groups = {"get_embedding_ranks": get_embedding_ranks}
    groups["get_position_embedding_ranks"] = get_position_embedding_ranks
    setup.initialize(cfg, **{name: choose for name, choose in groups.items() if choose is not None})


def set_jit_fusion_options(model_config: Any, micro_batch_size: int) -> None:
    """Do nothing; kept for API compatibility. Fused functions are compiled for the shapes of the first step."""


def create_peft_pre_wrap_hook(
    cfg: ConfigContainer, state: GlobalState
) -> Callable[[Chunks], Chunks]:
    """A hook that loads ``checkpoint.pretrained_checkpoint`` into a new model and adds adapters.

    Those whose factors are both zero, as a reference model has them, cannot be trained, and are frozen.
    """
    source = cfg.checkpoint.pretrained_checkpoint
    peft = cfg.peft
    if peft is None or source is None:
        raise UserError(
            f"peft={peft}, checkpoint.pretrained_checkpoint={source}: adapters need a method and a base, set both"
        )
    inits = [getattr(peft, f"lora_{factor}_init_method", None) for factor in "AB"]
    adapt = adapting_hook(cfg, training=inits != ["zero", "zero"])

    def hook(chunks: Chunks) -> Chunks:
        if pretrained.is_megatron_checkpoint(source):
            verification.verify(pretrained.local_weights(source), cfg.checkpoint.verify)
        return run_hooks([adapt], chunks)

    return hook


def setup_optimizer(
    optimizer_config: OptimizerConfig,
    scheduler_config: SchedulerConfig,
    model: MegatronModule | Sequence[MegatronModule],
    use_gloo_process_groups: bool = False,
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """The optimizer of the wrapped ``model``, and its schedule, which counts samples, from validated blocks."""
    if scheduler_config.lengths is None:
        raise UserError(
            "the schedule has no lengths, which come from train.train_iters and train.global_batch_size: call "
            "validate() of the ConfigContainer, with dataset=None, before setup_optimizer"
        )
    optimizer = build_optimizer(optimizer_config, as_chunks(model), use_gloo_process_groups)
    return optimizer, schedule(
        scheduler_config, optimizer_config, scheduler_config.lengths, optimizer
    )


def update_model_config_funcs(
    model: list[MegatronModule],
    model_config: Any,
    ddp_config: DistributedDataParallelConfig,
    optimizer: MegatronOptimizer | None,
    align_grad_reduce: bool = True,
    pg_collection: ProcessGroupCollection | None = None,
) -> None:
    """Set what Megatron-Core's schedules call, in the config that the chunks share; without optimizer, nothing.

    ``model_config``, the provider, stays as it is, because checkpoints hold it.
    """
    refuse_other_groups(pg_collection)
    if optimizer is not None:
        setup.connect(model, optimizer, ddp_config, align_grad_reduce)


HEAD = "output_layer."


def init_checkpointing_context(checkpoint_config: CheckpointConfig) -> dict[str, Any]:
    """What calls take as ``checkpointing_context``: empty, because nothing needs to be kept between saves."""
    return {}


def checkpoint_exists(checkpoints_path: str | None) -> bool:
    """Whether there is a checkpoint: the path is one iteration's folder, or a root whose tracker names one."""
    if checkpoints_path is None:
        return False
    try:
        return on_first_rank(lambda: paths.resolve(checkpoints_path).is_dir())
    except UserError:
        return False


def save_checkpoint(
    state: GlobalState,
    model: list[MegatronModule],
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float = 0.0,
    checkpointing_context: dict[str, Any] | None = None,
) -> Path:
    """Save ``state`` under its step in ``state.cfg.checkpoint.save``, as the newest checkpoint.

    An optimizer or scheduler that is None is left out; with ``cfg.peft``, so is what is not trained. With
    ``checkpoint.async_save``, ``maybe_finalize_async_save`` publishes the directory, which is returned.

    Raises:
        UserError: The folder is not set or cannot be written, or the disk is full; nothing is left behind.
    """
    checkpoint = state.cfg.checkpoint
    if checkpoint.save is None:
        raise UserError("checkpoint.save is not set: set it to the folder of the checkpoint")
    state.train_state.floating_point_operations_so_far = num_floating_point_operations_so_far
    if checkpoint.async_save:
        state.initialize_async_checkpoint_worker()
    run = run_of(state, model, optimizer, opt_param_scheduler)
    return save_load.save_run(run, state.async_saver if checkpoint.async_save else None)


def maybe_finalize_async_save(
    global_state: GlobalState,
    ckpt_cfg: CheckpointConfig | None = None,
    blocking: bool = False,
    terminate: bool = False,
) -> None:
    """Publish the save that goes on if all ranks have written it, or ``blocking``, as soon as they have.

    ``terminate`` waits, too, and ends what writes; the next save starts it again. All ranks call this.
    """
    saver = global_state.async_saver
    if saver is None:
        return
    saver.poll(wait=blocking or terminate)
    if terminate:
        saver.abort()
        global_state.async_saver = None


def load_checkpoint(
    state: GlobalState,
    model: list[MegatronModule],
    optimizer: Any,
    opt_param_scheduler: Any,
    strict: bool = True,
    checkpointing_context: dict[str, Any] | None = None,
    skip_load_to_model_and_opt: bool = False,
) -> tuple[int, float]:
    """Load ``checkpoint.load``, or if there is no checkpoint, the weights of ``checkpoint.pretrained_checkpoint``.

    In the second case ``checkpoint.finetune`` becomes True, to start at step 0. What is None of the optimizer and
    scheduler stays there. Returns the step, and the floating-point operations so far.
    """
    config = state.cfg.checkpoint
    resumes = config.load is not None and checkpoint_exists(config.load)
    if not resumes and config.pretrained_checkpoint is None:
        raise UserError(
            f"checkpoint.load={config.load} holds no checkpoint: give another one, or set "
            "checkpoint.pretrained_checkpoint to the weights to start from"
        )
    config.finetune = config.finetune or not resumes
    source = str(config.load if resumes else config.pretrained_checkpoint)
    return load_checkpoint_from_path(
        source, state, model, optimizer, opt_param_scheduler, strict, {}, skip_load_to_model_and_opt
    )


def load_checkpoint_from_path(
    load_dir: str,
    state: GlobalState,
    model: list[MegatronModule],
    optimizer: Any,
    opt_param_scheduler: Any,
    strict: bool = True,
    checkpointing_context: dict[str, Any] | None = None,
    skip_load_to_model_and_opt: bool = False,
    ignore_ckpt_step: bool = False,
) -> tuple[int, float]:
    """``load_checkpoint`` from ``load_dir``: all of it, or with ``checkpoint.finetune`` the weights.

    ``ignore_ckpt_step`` can have both values, because no config chooses a step: name its folder.
    """
    if skip_load_to_model_and_opt or not strict:
        raise UserError(
            f"strict={strict}, skip_load_to_model_and_opt={skip_load_to_model_and_opt}: leave them True and False"
        )
    config = state.cfg.checkpoint
    unpickling.trust_checkpoints(config.trust_checkpoint)
    directory = pretrained.local_weights(load_dir)
    if not on_first_rank(lambda: is_hf_model(directory)):
        verification.verify(directory, config.verify)
    if config.finetune:
        _load_weights(model, directory, config.ignore_adapter)
        reload_main_weights(optimizer)
    else:
        save_load.resume(run_of(state, model, optimizer, opt_param_scheduler), directory)
    return state.train_state.step, state.train_state.floating_point_operations_so_far


def load_model_weights_from_checkpoint(
    checkpoint_path: str, model: Sequence[MegatronModule], strict: bool = True
) -> None:
    """Fill ``model`` from a Megatron checkpoint, which may hold more than the model only if not ``strict``."""
    directory, metadata = model_io.examine(model, checkpoint_path)
    state = model_io.model_state(model, metadata)
    loaded = loading.load(state, directory, strict, known=model_io.BESIDE_WEIGHTS)
    model_io.set_model_state(model, loaded)


def generate_model_state_dict(
    model: Sequence[MegatronModule], model_sd_kwargs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The sharded state of the chunks as checkpoints of this package name it; it shares memory with them."""
    if model_sd_kwargs:
        raise UserError(
            f"model_sd_kwargs={model_sd_kwargs}: there is one format of state, leave them out"
        )
    return model_io.model_state(model, model_io.MODEL_METADATA)


def apply_peft_adapter_filter_to_state_dict(
    state_dict: dict[str, Any], peft_config: PEFT
) -> dict[str, Any]:
    """``state_dict`` with only what ``peft_config`` trains of each chunk; other entries stay."""
    return {
        key: {name: entry for name, entry in part.items() if peft_config.adapter_key_filter(name)}
        if key.startswith("model")
        else part
        for key, part in state_dict.items()
    }


def run_of(state: GlobalState, model: list[MegatronModule], optimizer: Any, scheduler: Any) -> Run:
    """A run with the parts that checkpoints hold; what is None is neither saved nor loaded."""
    saved = state.cfg.checkpoint
    optional = {
        name: optimizer is not None and getattr(saved, name)
        for name in ("save_optim", "load_optim")
    }
    return Run(
        config=replace(state.cfg, checkpoint=replace(saved, **optional)),
        origins=Origins({}),
        model=model,
        optimizer=optimizer,  # pyright: ignore[reportArgumentType]
        scheduler=scheduler,
        tokenizer=None,
        forward_step=None,  # pyright: ignore[reportArgumentType]  the program has its own loop
        callbacks=CallbackManager(),
        progress=state.train_state,
    )


def _load_weights(model: list[MegatronModule], directory: Path, ignore_adapter: bool) -> None:
    """Load weights to start from, without a value head, whose chunk hides it in ``hide_loss_modules``."""
    bare = [model_io.unwrap(chunk) for chunk in model]
    hiding: list[Any] = [
        chunk.hide_loss_modules for chunk in bare if hasattr(chunk, "hide_loss_modules")
    ]
    if not hiding:
        pretrained.load_weights(model, directory, ignore_adapter)
        return
    _, metadata = model_io.examine(model, directory, verify=False)
    with ExitStack() as hidden:
        for hide in hiding:
            hidden.enter_context(hide())
        state: dict[str, Any] = {
            key: chunk.sharded_state_dict(metadata=metadata)
            for key, chunk in zip(model_io.chunk_keys(model), bare, strict=True)
        }
    loaded = loading.load(state, directory, known=(*model_io.BESIDE_WEIGHTS, HEAD))
    for key, chunk in zip(state, bare, strict=True):
        lacking = chunk.load_state_dict(loaded[key], strict=False).missing_keys
        wrong = [
            name for name in lacking if not name.startswith(HEAD) and "_extra_state" not in name
        ]
        assert not wrong, f"not loaded after the checkpoint was read: {wrong}"
