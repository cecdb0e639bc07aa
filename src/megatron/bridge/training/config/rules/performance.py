# SPDX-License-Identifier: Apache-2.0
"""Rules on overlapped communication, activation offloading, CUDA graphs and profiling."""

from collections.abc import Iterator

from megatron.bridge.data.pretraining.gpt_config import GPTDatasetConfig, MockGPTDatasetConfig
from megatron.bridge.training.config.rules.values import unmet
from megatron.bridge.training.config.run_config import RunConfig


def param_gather_overlap_fits(config: RunConfig, world_size: int) -> Iterator[str]:
    """Only the distributed optimizer gathers weights, in the order of the reduced buckets."""
    ddp = config.ddp
    if ddp.overlap_param_gather and not ddp.use_distributed_optimizer:
        yield (
            "ddp.overlap_param_gather=True needs the distributed optimizer: set "
            "ddp.use_distributed_optimizer=true, or switch the overlap off"
        )
    elif ddp.overlap_param_gather and not ddp.overlap_grad_reduce:
        yield "ddp.overlap_param_gather=True needs ddp.overlap_grad_reduce=True: set both"


def p2p_overlap_needs_virtual_stages(config: RunConfig, world_size: int) -> Iterator[str]:
    """The non-interleaved schedule does not support the overlap."""
    if config.model.overlap_p2p_comm and (config.model.virtual_pipeline_model_parallel_size or 1) == 1:
        yield (
            "model.overlap_p2p_comm=True needs virtual pipeline stages: set "
            "model.virtual_pipeline_model_parallel_size=2 or more, or switch the overlap off"
        )


def tensor_overlap_needs_sequence_parallelism(config: RunConfig, world_size: int) -> Iterator[str]:
    """The overlap hides the gather and scatter of sequence parallelism."""
    size, splits = config.model.tensor_model_parallel_size, config.model.sequence_parallel
    if config.model.tp_comm_overlap and not (size > 1 and splits):
        yield (
            f"model.tp_comm_overlap=True with tensor_model_parallel_size={size} and sequence_parallel={splits}: "
            "set model.tensor_model_parallel_size=2 or more and model.sequence_parallel=true, or switch it off"
        )


def expert_overlap_fits(config: RunConfig, world_size: int) -> Iterator[str]:
    """The overlap interleaves two microbatches layer by layer, in half precision, without full recomputation."""
    model = config.model
    selected = (model.recompute_modules or ()) if model.recompute_granularity == "selective" else ()
    needs = {
        "model.expert_model_parallel_size=2 or more": model.expert_model_parallel_size > 1,
        "model.moe_token_dispatcher_type=alltoall or flex": model.moe_token_dispatcher_type in ("alltoall", "flex"),
        "mixed_precision=bf16_mixed or fp16_mixed": model.bf16 or model.fp16,
        "model.virtual_pipeline_model_parallel_size with a pipeline": model.pipeline_model_parallel_size == 1
        or (model.virtual_pipeline_model_parallel_size or 1) > 1,
        "model.recompute_granularity=selective or null": model.recompute_granularity != "full",
        "model.recompute_modules without moe": "moe" not in selected,
        "model.moe_shared_expert_overlap=false": not model.moe_shared_expert_overlap,
        "model.mtp_num_layers of 1 at most": (model.mtp_num_layers or 0) <= 1,
    }
    if model.overlap_moe_expert_parallel_comm:
        yield from unmet("model.overlap_moe_expert_parallel_comm=True", needs)


def delayed_wgrad_needs_expert_overlap(config: RunConfig, world_size: int) -> Iterator[str]:
    """Weight gradients are delayed to overlap with the all-to-all of experts."""
    model, ddp = config.model, config.ddp
    if model.delay_wgrad_compute != ddp.delay_wgrad_compute:
        yield (
            f"model.delay_wgrad_compute={model.delay_wgrad_compute} and ddp.delay_wgrad_compute="
            f"{ddp.delay_wgrad_compute} must agree: set comm_overlap.delay_wgrad_compute, which sets both"
        )
    elif model.delay_wgrad_compute and not model.overlap_moe_expert_parallel_comm:
        yield (
            "model.delay_wgrad_compute=True needs model.overlap_moe_expert_parallel_comm=True: set both, or "
            "switch it off"
        )


def deferred_embedding_fits(config: RunConfig, world_size: int) -> Iterator[str]:
    """Only a pipeline drains, and only fused gradient accumulation can be deferred."""
    model, key = config.model, "model.defer_embedding_wgrad_compute=True"
    if not model.defer_embedding_wgrad_compute:
        return
    if model.pipeline_model_parallel_size == 1:
        yield f"{key} with pipeline_model_parallel_size=1: use 2 or more stages, or switch it off"
    if not model.gradient_accumulation_fusion:
        yield f"{key} needs model.gradient_accumulation_fusion=True, which takes a GPU and Apex: switch it off"


def offloading_fits(config: RunConfig, world_size: int) -> Iterator[str]:
    """Whole layers or modules are offloaded, and whole layers only without pipeline and recomputation."""
    model, most = config.model, config.model.num_layers - 1
    if model.fine_grained_activation_offloading and not model.offload_modules:
        yield (
            "model.fine_grained_activation_offloading=True without model.offload_modules: say what, for example "
            "core_attn"
        )
    needs = {
        "model.pipeline_model_parallel_size=1": model.pipeline_model_parallel_size == 1,
        "model.recompute_granularity=null": model.recompute_granularity is None,
        f"model.cpu_offloading_num_layers between 0 and {most}": 0 <= model.cpu_offloading_num_layers <= most,
    }
    if model.cpu_offloading:
        yield from unmet("model.cpu_offloading=True", needs)


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


TOOLS = ("use_pytorch_profiler", "use_nsys_profiler", "record_memory_history", "nvtx_ranges")


def profiling_has_tool_steps_and_ranks(config: RunConfig, world_size: int) -> Iterator[str]:
    """A profile needs a tool, steps, ranks and a folder."""
    profiling = config.profiling
    if profiling is None:
        return
    first, last, steps = profiling.profile_step_start, profiling.profile_step_end, config.train.train_iters
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
        yield (f"{' and '.join(watchers)} watch the GPU's kernels, which only one can at a time: leave all but one out")


def profiles_need_a_folder(config: RunConfig, world_size: int) -> Iterator[str]:
    """A profile without a folder would be lost."""
    profiling = config.profiling
    if profiling is None:
        return
    to_a_file = [tool for tool in ("use_pytorch_profiler", "record_memory_history") if getattr(profiling, tool)]
    if to_a_file and config.logger.log_dir is None:
        yield f"profiling.{to_a_file[0]}=True without a folder: give logger.log_dir or checkpoint.save"
    if profiling.record_shapes and not (profiling.use_pytorch_profiler or profiling.use_nsys_profiler):
        yield "profiling.record_shapes=True has no effect without a profiler: choose one, or remove it"
