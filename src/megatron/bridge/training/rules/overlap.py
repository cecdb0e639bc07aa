# SPDX-License-Identifier: Apache-2.0
"""Rules on communication beside computation, and on activations that wait elsewhere."""

from megatron.bridge.training.config import ConfigContainer


def param_gather_overlap_fits(config: ConfigContainer, world_size: int) -> str | None:
    """Only a sharded optimizer gathers weights, and the order of buckets comes from the reduction."""
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


def gathers_are_beside_the_forward_pass(config: ConfigContainer, world_size: int) -> str | None:
    """Gathering beside the optimizer's step needs model chunks with optimizers of their own."""
    if not config.optimizer.overlap_param_gather_with_optimizer_step:
        return None
    return (
        "optimizer.overlap_param_gather_with_optimizer_step=True: not available in this version, use "
        "ddp.overlap_param_gather=true"
    )


def p2p_overlap_needs_virtual_stages(config: ConfigContainer, world_size: int) -> str | None:
    """The plain pipeline schedule refuses it in the first step; without a pipeline there is nothing to send."""
    model = config.model
    if not model.overlap_p2p_comm or (model.virtual_pipeline_model_parallel_size or 1) > 1:
        return None
    return (
        "model.overlap_p2p_comm=True needs virtual pipeline stages: set "
        "model.virtual_pipeline_model_parallel_size=2 or more, or switch the overlap off"
    )


def tensor_overlap_needs_sequence_parallelism(config: ConfigContainer, world_size: int) -> str | None:
    """What overlaps are the gather and the scatter of sequences around a matrix product."""
    model = config.model
    if not model.tp_comm_overlap or (model.tensor_model_parallel_size > 1 and model.sequence_parallel):
        return None
    return (
        f"model.tp_comm_overlap=True with tensor_model_parallel_size={model.tensor_model_parallel_size} and "
        f"sequence_parallel={model.sequence_parallel}: set model.tensor_model_parallel_size=2 or more and "
        "model.sequence_parallel=true, or switch it off"
    )


def expert_overlap_fits(config: ConfigContainer, world_size: int) -> str | None:
    """Two microbatches pass each other layer by layer, in half precision, and none of the passes is repeated."""
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


def delayed_gradients_fill_messages(config: ConfigContainer, world_size: int) -> str | None:
    """They are put off until tokens are on their way."""
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


def deferred_embedding_fits(config: ConfigContainer, world_size: int) -> str | None:
    """Only a pipeline drains, and only the fused gradient can be added later."""
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


def buckets_hold_something(config: ConfigContainer, world_size: int) -> str | None:
    """A size, and one of the two ways of giving it."""
    size, count = config.ddp.bucket_size, config.ddp.num_buckets
    given = {"bucket_size": size, "num_buckets": count}
    wrong = [f"ddp.{name}={value}" for name, value in given.items() if value is not None and value < 1]
    if wrong:
        return f"{', '.join(wrong)}: must be at least 1, or unset"
    if size and count:
        return f"ddp.bucket_size={size} and ddp.num_buckets={count} are two ways of saying the same: remove one"
    return None


def offloading_fits(config: ConfigContainer, world_size: int) -> str | None:
    """Whole layers or parts of them; of layers, all but one, without a pipeline or recomputation."""
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


def deterministic_layers_read_one_sample(config: ConfigContainer, world_size: int) -> str | None:
    """Megatron-Core's deterministic gated delta rule knows no bounds between samples: an assertion in a step."""
    model = config.model
    delta = getattr(model, "experimental_attention_variant", None) == "gated_delta_net"
    if not (model.deterministic_mode and delta and config.dataset.joins_samples):
        return None
    return (
        "model.deterministic_mode=True with gated delta nets and packed samples: unpack the samples, or switch "
        "model.deterministic_mode off"
    )
