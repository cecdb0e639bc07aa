# SPDX-License-Identifier: Apache-2.0
"""Rules on overlapped communication, activation offloading, CUDA graphs and profiling."""

from collections.abc import Iterator

from megatron.bridge.backends.specs.layer_specs import resolve_backend
from megatron.bridge.data.pretraining.gpt_config import GPTDatasetConfig, MockGPTDatasetConfig
from megatron.bridge.training.config.rules.values import unmet
from megatron.bridge.training.config.run_config import RunConfig


def expert_overlap_keeps_experts(config: RunConfig, world_size: int) -> Iterator[str]:
    """The overlap interleaves two microbatches layer by layer, so it does not support experts that are recomputed."""
    model = config.model
    selected = (model.recompute_modules or ()) if model.recompute_granularity == "selective" else ()
    if model.overlap_moe_expert_parallel_comm and "moe" in selected:
        yield "model.overlap_moe_expert_parallel_comm=True needs model.recompute_modules without moe: leave it out"


def delayed_wgrad_is_set_for_both(config: RunConfig, world_size: int) -> Iterator[str]:
    """The model delays its weight gradients, and the buckets wait for them."""
    model = config.model
    ddp = config.ddp
    if model.delay_wgrad_compute != ddp.delay_wgrad_compute:
        yield (
            f"model.delay_wgrad_compute={model.delay_wgrad_compute} and ddp.delay_wgrad_compute="
            f"{ddp.delay_wgrad_compute} must agree: set comm_overlap.delay_wgrad_compute, which sets both"
        )


def offloaded_layers_exist(config: RunConfig, world_size: int) -> Iterator[str]:
    """Whole layers are offloaded, and the last one is needed at once."""
    count = config.model.cpu_offloading_num_layers
    limit = config.model.num_layers - 1
    if config.model.cpu_offloading and not 1 <= count <= limit:
        yield f"model.cpu_offloading_num_layers={count} with model.cpu_offloading=True: must lie between 1 and {limit}"


def offloading_fits_backend(config: RunConfig, world_size: int) -> Iterator[str]:
    """A layer that is recomputed saves its input alone; Transformer Engine offloads one stage without recomputation."""
    model = config.model
    if not model.cpu_offloading:
        return
    key = "model.cpu_offloading=True"
    recomputed = model.recompute_granularity
    if resolve_backend(model.backend) == "torch":
        if recomputed == "full":
            yield f"{key} with model.recompute_granularity=full: use selective, or switch one of them off"
        return
    if model.pipeline_model_parallel_size > 1 or recomputed is not None:
        yield (
            f"{key} needs model.pipeline_model_parallel_size=1 and model.recompute_granularity=null with "
            "Transformer Engine: set both, or model.backend=torch"
        )


def deterministic_delta_nets_are_unpacked(config: RunConfig, world_size: int) -> Iterator[str]:
    """Megatron-Core's deterministic gated delta rule does not support packed samples."""
    delta = getattr(config.model, "experimental_attention_variant", None) == "gated_delta_net"
    if delta and config.model.deterministic_mode and config.dataset.joins_samples:
        yield (
            "model.deterministic_mode=True with gated delta nets and packed samples: unpack the samples, or "
            "switch model.deterministic_mode off"
        )


FULL_ITERATION = "full_iteration"


def cuda_graphs_fit(config: RunConfig, world_size: int) -> Iterator[str]:
    """A graph repeats its kernels on tensors of the same shape, and nothing that the host did or read."""
    kind = config.model.cuda_graph_impl
    if kind == "transformer_engine":
        yield "model.cuda_graph_impl=transformer_engine is not available in this version: use local or full_iteration"
    elif kind != "none":
        parts = (
            _needs_of_an_iteration(config) if kind == FULL_ITERATION else _needs_of_layers(config)
        )
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
        "model.recompute_granularity=selective or null": config.model.recompute_granularity
        != "full",
        **(
            {}
            if partial
            else _capacity(
                config, "moe_expert_capacity_factor, or cuda_graph_modules without moe", True
            )
        ),
    }


def _capacity(config: RunConfig, further: str, met: bool) -> dict[str, bool]:
    """The host reads how many tokens an expert has, unless all have equally many."""
    model = config.model
    padded = model.moe_expert_capacity_factor is not None and model.moe_pad_expert_input_to_capacity
    name = f"model.moe_pad_expert_input_to_capacity=true with {further}"
    return {name: not model.num_moe_experts or (padded and met)}


TOOLS = ("use_pytorch_profiler", "use_nsys_profiler", "record_memory_history", "nvtx_ranges")


def profiling_has_tool_steps_and_ranks(config: RunConfig, world_size: int) -> Iterator[str]:
    """A profile needs a tool, steps, ranks and a folder."""
    profiling = config.profiling
    if profiling is None:
        return
    first = profiling.profile_step_start
    last = profiling.profile_step_end
    steps = config.train.train_iters
    if not any(getattr(profiling, tool) for tool in TOOLS):
        yield f"profiling is set, but nothing is profiled: set one of {', '.join(TOOLS)}, or unset profiling"
    if not 0 <= first < last:
        yield (
            f"profiling.profile_step_start={first} and profile_step_end={last}: profile at least one step, for "
            f"example from {max(first, 0)} to {max(first, 0) + 2}"
        )
    if first >= steps:
        yield f"profiling.profile_step_start={first}, but train.train_iters={steps}: begin before the last step"
    strangers = [rank for rank in profiling.profile_ranks if not 0 <= rank < world_size]
    if strangers:
        yield (
            f"profiling.profile_ranks={profiling.profile_ranks}, but the ranks of this run are 0 to "
            f"{world_size - 1}: leave {', '.join(map(str, strangers))} out"
        )


def one_gpu_profiler_at_a_time(config: RunConfig, world_size: int) -> Iterator[str]:
    """The driver allows one profiler of GPU kernels at a time."""
    watchers = [f"profiling.{tool}" for tool in TOOLS[:2] if getattr(config.profiling, tool, False)]
    if config.nvrx_straggler is not None and config.nvrx_straggler.enabled:
        watchers.append("nvrx_straggler")
    if len(watchers) > 1:
        yield (
            f"{' and '.join(watchers)} watch the GPU's kernels, which only one can at a time: leave all but one out"
        )
