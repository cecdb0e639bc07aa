# SPDX-License-Identifier: Apache-2.0
"""Rules on overlapped communication and on activation offloading."""

from megatron.bridge.training.config.run_config import RunConfig


def param_gather_overlap_fits(config: RunConfig, world_size: int) -> str | None:
    """Only the distributed optimizer gathers weights, in the order of the reduced buckets."""
    ddp = config.ddp
    if not ddp.overlap_param_gather:
        return None
    if not ddp.use_distributed_optimizer:
        return (
            "ddp.overlap_param_gather=True needs the distributed optimizer: set "
            "ddp.use_distributed_optimizer=true, or switch the overlap off"
        )
    if not ddp.overlap_grad_reduce:
        return "ddp.overlap_param_gather=True needs ddp.overlap_grad_reduce=True: set both"
    return None


def param_gather_overlaps_forward_only(config: RunConfig, world_size: int) -> str | None:
    """Overlap with the optimizer step needs one optimizer per model chunk."""
    if not config.optimizer.overlap_param_gather_with_optimizer_step:
        return None
    return (
        "optimizer.overlap_param_gather_with_optimizer_step=True: not available in this version, use "
        "ddp.overlap_param_gather=true"
    )


def p2p_overlap_needs_virtual_stages(config: RunConfig, world_size: int) -> str | None:
    """The non-interleaved schedule does not support the overlap."""
    model = config.model
    if not model.overlap_p2p_comm or (model.virtual_pipeline_model_parallel_size or 1) > 1:
        return None
    return (
        "model.overlap_p2p_comm=True needs virtual pipeline stages: set "
        "model.virtual_pipeline_model_parallel_size=2 or more, or switch the overlap off"
    )


def tensor_overlap_needs_sequence_parallelism(config: RunConfig, world_size: int) -> str | None:
    """The overlap hides the gather and scatter of sequence parallelism."""
    model = config.model
    if not model.tp_comm_overlap or (model.tensor_model_parallel_size > 1 and model.sequence_parallel):
        return None
    return (
        f"model.tp_comm_overlap=True with tensor_model_parallel_size={model.tensor_model_parallel_size} and "
        f"sequence_parallel={model.sequence_parallel}: set model.tensor_model_parallel_size=2 or more and "
        "model.sequence_parallel=true, or switch it off"
    )


def expert_overlap_fits(config: RunConfig, world_size: int) -> str | None:
    """The overlap interleaves two microbatches layer by layer, in half precision, without full recomputation."""
    model = config.model
    if not model.overlap_moe_expert_parallel_comm:
        return None
    dispatcher = model.moe_token_dispatcher_type
    selected = (model.recompute_modules or ()) if model.recompute_granularity == "selective" else ()
    needs = {
        "model.expert_model_parallel_size=2 or more": model.expert_model_parallel_size > 1,
        "model.moe_token_dispatcher_type=alltoall or flex": dispatcher in ("alltoall", "flex"),
        "mixed_precision=bf16_mixed or fp16_mixed": model.bf16 or model.fp16,
        "model.virtual_pipeline_model_parallel_size with a pipeline": model.pipeline_model_parallel_size == 1
        or (model.virtual_pipeline_model_parallel_size or 1) > 1,
        "model.recompute_granularity=selective or null": model.recompute_granularity != "full",
        "model.recompute_modules without moe": "moe" not in selected,
        "model.moe_shared_expert_overlap=false": not model.moe_shared_expert_overlap,
        "model.mtp_num_layers of 1 at most": (model.mtp_num_layers or 0) <= 1,
    }
    missing = [need for need, met in needs.items() if not met]
    if not missing:
        return None
    return f"model.overlap_moe_expert_parallel_comm=True needs {'; '.join(missing)}: or switch it off"


def delayed_wgrad_needs_expert_overlap(config: RunConfig, world_size: int) -> str | None:
    """Weight gradients are delayed to overlap with the all-to-all of experts."""
    model, ddp = config.model, config.ddp
    if model.delay_wgrad_compute != ddp.delay_wgrad_compute:
        return (
            f"model.delay_wgrad_compute={model.delay_wgrad_compute} and ddp.delay_wgrad_compute="
            f"{ddp.delay_wgrad_compute} must agree: set comm_overlap.delay_wgrad_compute, which sets both"
        )
    if not model.delay_wgrad_compute or model.overlap_moe_expert_parallel_comm:
        return None
    return (
        "model.delay_wgrad_compute=True needs model.overlap_moe_expert_parallel_comm=True: set both, or switch it "
        "off"
    )


def deferred_embedding_fits(config: RunConfig, world_size: int) -> str | None:
    """Only a pipeline drains, and only fused gradient accumulation can be deferred."""
    model = config.model
    if not model.defer_embedding_wgrad_compute:
        return None
    if model.pipeline_model_parallel_size == 1:
        return (
            "model.defer_embedding_wgrad_compute=True with pipeline_model_parallel_size=1: use 2 or more stages, "
            "or switch it off"
        )
    if not model.gradient_accumulation_fusion:
        return (
            "model.defer_embedding_wgrad_compute=True needs model.gradient_accumulation_fusion=True, which takes "
            "a GPU and Apex: switch it off"
        )
    if model.wgrad_deferral_limit < 0:
        return (
            f"model.wgrad_deferral_limit={model.wgrad_deferral_limit}: use a number of microbatches, or 0 for all"
        )
    return None


def bucket_size_is_given_once(config: RunConfig, world_size: int) -> str | None:
    """``bucket_size`` and ``num_buckets`` both set the size of a bucket."""
    size, count = config.ddp.bucket_size, config.ddp.num_buckets
    if not (size and count):
        return None
    return f"ddp.bucket_size={size} and ddp.num_buckets={count} both set the size of a bucket: remove one"


def offloading_fits(config: RunConfig, world_size: int) -> str | None:
    """Whole layers or modules are offloaded, and whole layers only without pipeline and recomputation."""
    model = config.model
    if model.cpu_offloading and model.fine_grained_activation_offloading:
        return (
            "model.cpu_offloading=True and model.fine_grained_activation_offloading=True exclude each other: "
            "switch one off"
        )
    if model.fine_grained_activation_offloading and not model.offload_modules:
        return (
            "model.fine_grained_activation_offloading=True without model.offload_modules: say what, for example "
            "core_attn"
        )
    if not model.cpu_offloading:
        return None
    needs = {
        "model.pipeline_model_parallel_size=1": model.pipeline_model_parallel_size == 1,
        "model.recompute_granularity=null": model.recompute_granularity is None,
        f"model.cpu_offloading_num_layers between 0 and {model.num_layers - 1}": 0
        <= model.cpu_offloading_num_layers
        < model.num_layers,
    }
    missing = [need for need, met in needs.items() if not met]
    return f"model.cpu_offloading=True needs {'; '.join(missing)}: or switch it off" if missing else None


def deterministic_delta_nets_are_unpacked(config: RunConfig, world_size: int) -> str | None:
    """Megatron-Core's deterministic gated delta rule does not support packed samples."""
    model = config.model
    delta = getattr(model, "experimental_attention_variant", None) == "gated_delta_net"
    if not (model.deterministic_mode and delta and config.dataset.joins_samples):
        return None
    return (
        "model.deterministic_mode=True with gated delta nets and packed samples: unpack the samples, or switch "
        "model.deterministic_mode off"
    )
