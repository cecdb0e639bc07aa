# SPDX-License-Identifier: Apache-2.0
"""Rules on names and choices that a script can misspell without an error, and on what is not available."""

import dataclasses
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from megatron.bridge.training.config.rules.values import default_of, value_of
from megatron.bridge.training.config.run_config import RunConfig
from megatron.bridge.utils.config.coerce import field_types
from megatron.bridge.utils.config.serialize import phantom_attributes

_ABSENT = "not available in this version, leave it unset"
_CORE_ENGINE = "a setting of Megatron-Core's inference engine, which is not used here: unset it"
_DEAD = (
    "gtp_weight_remat_size tensor_parallel_num_weight_shards expert_gtp_weight_remat_size log_max_attention_logit "
    "expert_tensor_parallel_num_weight_shards pipeline_model_parallel_comm_backend hybrid_context_parallel qk_clip "
    "moe_per_layer_logging mtp_hybrid_override_pattern use_grouped_gemm_for_dense_mlp use_te_rng_tracker"
)
_OF_CORE_ENGINE = (
    "flash_decode nccl_all_reduce_for_prefill symmetric_ar_type use_inference_optimized_layers inference_rng_tracker "
    "inference_cuda_graph_scope inference_sampling_seed mlp_chunks_for_prefill inference_fuse_tp_communication "
    "inference_disable_triton_nvls_kernels inference_grouped_gemm_backend inference_moe_token_dispatcher_type "
    "inference_moe_disable_fused_quant_kernels moe_pad_experts_for_cuda_graph_inference"
)
UNAVAILABLE = {
    "tensor_inspect": _ABSENT,
    **{f"model.{name}": _ABSENT for name in _DEAD.split()},
    **{f"model.{name}": _CORE_ENGINE for name in _OF_CORE_ENGINE.split()},
    **dict.fromkeys(("model.enable_cuda_graph", "model.external_cuda_graph"), "use model.cuda_graph_impl=local"),
    "optimizer.optimizer_cuda_graph": _ABSENT,
    # Megatron-Core declares these and never reads them
    "model.apply_residual_connection_post_layernorm": "never read, use model.norm_placement",
    "model.disable_bf16_reduced_precision_matmul": "never read, set "
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction in a script",
    "model.is_hybrid_model": "never read, use model.hybrid_override_pattern",
    "model.moe_token_dropping": "never read, use model.moe_expert_capacity_factor",
    "model.moe_router_topk_limited_devices": "never read, use model.moe_router_group_topk",
    # Megatron-Core would pass forward steps an argument that they do not accept
    "model.num_microbatches_with_partial_activation_checkpoints": "not available in this version, use "
    "model.recompute_granularity",
    # it needs one optimizer per model chunk
    "optimizer.overlap_param_gather_with_optimizer_step": "not available in this version, use "
    "ddp.overlap_param_gather=true",
    "optimizer.use_layer_wise_distributed_optimizer": "not supported, because the state cannot be saved: unset it",
    "optimizer.use_torch_optimizer_for_cpu_offload": "never read, because the CPU always uses torch's optimizer",
    "optimizer.main_grads_dtype": "never read, use ddp.grad_reduce_in_fp32",
}
"""Settings that must keep their defaults -> why, and what to do instead."""


def attributes_are_fields(config: RunConfig, world_size: int) -> Iterator[str]:
    """A misspelled attribute would be set and never read."""
    for key, block in _blocks(config):
        yield from phantom_attributes(block, key)


def literals_are_known(config: RunConfig, world_size: int) -> Iterator[str]:
    """A misspelled choice would count as another one. Megatron-Core checks the model's choices."""
    for key, block in _blocks(config):
        for name, annotation in field_types(type(block)).items() if block is not config.model else ():
            if (choices := _choices(annotation)) and (value := getattr(block, name)) not in choices:
                yield f"{key}.{name}={value}: use one of {', '.join(map(str, choices))}"


def unavailable_settings_are_unset(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings of features that this version does not have would be ignored, or fail in the first step."""
    for key, remedy in UNAVAILABLE.items():
        value = value_of(config, key)
        if value is not None and value is not False and value != default_of(config, key):
            yield f"{key}={value}: {remedy}"


def _blocks(config: RunConfig) -> Iterator[tuple[str, Any]]:
    yield "", config
    yield from ((key, block) for key, block in vars(config).items() if dataclasses.is_dataclass(block))


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The choices of a ``Literal`` annotation, None included; empty for any other annotation."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    members = [member for member in get_args(annotation) if member is not NoneType]
    if len(members) == 1 and get_origin(members[0]) is Literal:
        return (*get_args(members[0]), None)
    return ()
