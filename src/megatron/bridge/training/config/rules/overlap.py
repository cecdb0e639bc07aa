# SPDX-License-Identifier: Apache-2.0
"""Rules on overlapped communication and on activation offloading."""

from collections.abc import Iterator

from megatron.bridge.training.config.rules.nearest_values import unmet
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
