# SPDX-License-Identifier: Apache-2.0
"""The rule on CUDA graphs."""

from collections.abc import Iterator

from megatron.bridge.data.pretraining.gpt_config import GPTDatasetConfig
from megatron.bridge.data.pretraining.mock_config import MockGPTDatasetConfig
from megatron.bridge.training.config.rules.nearest_values import unmet
from megatron.bridge.training.config.run_config import RunConfig

FULL_ITERATION = "full_iteration"


def cuda_graphs_fit(config: RunConfig, world_size: int) -> Iterator[str]:
    """A graph repeats its kernels on tensors of the same shape, and nothing that the host did or read."""
    kind = config.model.cuda_graph_impl
    if kind == "transformer_engine":
        yield "model.cuda_graph_impl=transformer_engine is not available in this version: use local or full_iteration"
    elif kind != "none":
        parts = _needs_of_an_iteration(config) if kind == FULL_ITERATION else _needs_of_layers(config)
        yield from unmet(f"model.cuda_graph_impl={kind}", _needs(config) | parts)


def _needs(config: RunConfig) -> dict[str, bool]:
    model = config.model
    return {
        "rows of one length (GPTDatasetConfig or MockGPTDatasetConfig)": isinstance(
            config.dataset, GPTDatasetConfig | MockGPTDatasetConfig
        ),
        "train.rampup_batch_size=null": config.train.rampup_batch_size is None,
        "no FSDP": not (config.dist.use_torch_fsdp2 or config.ddp.use_megatron_fsdp),
        "no teacher": config.distill is None,
        "model.mtp_num_layers=null": not model.mtp_num_layers,
        "model.overlap_moe_expert_parallel_comm=false": not model.overlap_moe_expert_parallel_comm,
    }


def _needs_of_an_iteration(config: RunConfig) -> dict[str, bool]:
    model = config.model
    sends = model.pipeline_model_parallel_size > 1 and model.batch_p2p_comm
    return {
        "model.cuda_graph_modules=[]": not model.cuda_graph_modules,
        "bf16 or fp32": not model.fp16,  # Megatron-Core gives the loss scale other memory when it changes
        "ddp.check_for_nan_in_grad=false": not config.ddp.check_for_nan_in_grad,
        "logger.timing_log_level=0": not config.logger.timing_log_level,
        "model.batch_p2p_sync=false": not (sends and model.batch_p2p_sync),
        **_capacity(
            config,
            "moe_expert_capacity_factor and moe_token_dispatcher_type=alltoall",
            model.moe_token_dispatcher_type == "alltoall",
        ),
    }


def _needs_of_layers(config: RunConfig) -> dict[str, bool]:
    modules = {getattr(module, "name", module) for module in config.model.cuda_graph_modules}
    partial = bool(modules) and "moe" not in modules
    return {
        "model.recompute_granularity=selective or null": config.model.recompute_granularity != "full",
        **({} if partial else _capacity(config, "moe_expert_capacity_factor, or cuda_graph_modules without moe", True)),
    }


def _capacity(config: RunConfig, further: str, met: bool) -> dict[str, bool]:
    """The host reads how many tokens an expert has, unless all have equally many."""
    model = config.model
    padded = model.moe_expert_capacity_factor is not None and model.moe_pad_expert_input_to_capacity
    name = f"model.moe_pad_expert_input_to_capacity=true with {further}"
    return {name: not model.num_moe_experts or (padded and met)}
