# SPDX-License-Identifier: Apache-2.0
"""Set-up of a program with a loop of its own: process groups, adapters, optimizer, and what schedules call."""

from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from megatron.bridge.checkpoint import verification
from megatron.bridge.checkpoint.model_io import as_chunks
from megatron.bridge.models.conversion import pretrained
from megatron.bridge.models.model_provider import refuse_other_groups, run_hooks
from megatron.bridge.training import setup
from megatron.bridge.training.config import ConfigContainer, OptimizerConfig, SchedulerConfig
from megatron.bridge.training.initialize.peft import adapting_hook
from megatron.bridge.training.optim.optimizer import build_optimizer
from megatron.bridge.training.optim.scheduler import schedule
from megatron.bridge.training.state import GlobalState
from megatron.bridge.utils.errors import UserError

Chunks = list[MegatronModule]
EmbeddingRanks = Callable[..., list[int]] | None


def initialize_megatron(
    cfg: ConfigContainer,
    get_embedding_ranks: EmbeddingRanks = None,
    get_position_embedding_ranks: EmbeddingRanks = None,
) -> None:
    """Join the process group, unless that is done, make the model-parallel groups, and seed everything.

    The two functions choose the pipeline ranks that hold embeddings; None is Megatron-Core's choice.
    """
    groups = {"get_embedding_ranks": get_embedding_ranks}
    groups["get_position_embedding_ranks"] = get_position_embedding_ranks
    setup.initialize(cfg, **{name: choose for name, choose in groups.items() if choose is not None})


def set_jit_fusion_options(model_config: Any, micro_batch_size: int) -> None:
    """Nothing: torch needs no options, and fused functions are compiled for the shapes of the first step."""


def create_peft_pre_wrap_hook(cfg: ConfigContainer, state: GlobalState) -> Callable[[Chunks], Chunks]:
    """A hook that loads ``checkpoint.pretrained_checkpoint`` into a new model and adds adapters.

    Those whose factors are both zero, as a reference model has them, cannot be trained, and are frozen.
    """
    source, peft = cfg.checkpoint.pretrained_checkpoint, cfg.peft
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
    return optimizer, schedule(scheduler_config, optimizer_config, scheduler_config.lengths, optimizer)


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
