# SPDX-License-Identifier: Apache-2.0
"""Rules on single settings.

They are on how small and how large a number may be, on names and choices that a script can misspell without an error,
and on what is not available.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from megatron.bridge.training.config.rules.values import default_of, value_of
from megatron.bridge.training.config.run_config import RunConfig
from megatron.bridge.utils.config.coerce import field_types
from megatron.bridge.utils.config.ranges import (
    BELOW_ONE,
    FINITE,
    infinite_numbers,
    numbers_in,
    ranges_of,
)
from megatron.bridge.utils.config.serialize import phantom_attributes

_LARGEST = 2**53  # no size, count or seed is larger, and a float counts no further


def numbers_are_finite(config: RunConfig, world_size: int) -> Iterator[str]:
    """NaN and infinity would spread to every weight, and tensors count in 64 bits."""
    infinite = infinite_numbers(config)
    if infinite:
        yield f"{', '.join(infinite)}: {FINITE}"
    large = [
        f"{key}={value}"
        for key, value in numbers_in(config)
        if isinstance(value, int) and abs(value) >= _LARGEST
    ]
    if large:
        yield f"{', '.join(large)}: must be below {_LARGEST}"


def sizes_are_in_range(config: RunConfig, world_size: int) -> Iterator[str]:
    """Megatron-Core, and other rules, would divide by zero or compute NaN."""
    yield from _out_of_range(config, sizes=True)


def numbers_are_in_range(config: RunConfig, world_size: int) -> Iterator[str]:
    """Intervals, times, probabilities and the optimizer's numbers have legal ranges."""
    yield from _out_of_range(config, sizes=False)


# blocks with sizes, which are numbers with which other rules compute
_BLOCKS_WITH_SIZES = ("model", "tokenizer", "dataset", "peft", "rng")


def _out_of_range(config: RunConfig, sizes: bool) -> Iterator[str]:
    for block_name, block in _blocks(config):
        for name, allowed in ranges_of(type(block)).items():
            is_size = block_name in _BLOCKS_WITH_SIZES and allowed != BELOW_ONE
            problem = allowed.refusal(f"{block_name}.{name}", getattr(block, name))
            if is_size == sizes and problem:
                yield problem


@dataclass(frozen=True)
class Unavailable:
    """Settings that must keep their defaults."""

    settings: list[str]
    remedy: str  # why, and what to do instead


_UNAVAILABLE = [
    Unavailable(
        [
            "tensor_inspect",
            "model.gtp_weight_remat_size",
            "model.tensor_parallel_num_weight_shards",
            "model.expert_gtp_weight_remat_size",
            "model.log_max_attention_logit",
            "model.expert_tensor_parallel_num_weight_shards",
            "model.pipeline_model_parallel_comm_backend",
            "model.moe_per_layer_logging",
            "model.mtp_hybrid_override_pattern",
            "model.use_grouped_gemm_for_dense_mlp",
            "model.use_te_rng_tracker",
            "optimizer.optimizer_cuda_graph",
        ],
        remedy="not available in this version, leave it unset",
    ),
    Unavailable(
        [
            "model.flash_decode",
            "model.nccl_all_reduce_for_prefill",
            "model.symmetric_ar_type",
            "model.use_inference_optimized_layers",
            "model.inference_rng_tracker",
            "model.inference_cuda_graph_scope",
            "model.inference_sampling_seed",
            "model.mlp_chunks_for_prefill",
            "model.inference_fuse_tp_communication",
            "model.inference_disable_triton_nvls_kernels",
            "model.inference_grouped_gemm_backend",
            "model.inference_moe_token_dispatcher_type",
            "model.inference_moe_disable_fused_quant_kernels",
            "model.moe_pad_experts_for_cuda_graph_inference",
        ],
        remedy="a setting of Megatron-Core's inference engine, which is not used here: unset it",
    ),
    Unavailable(["ddp.use_custom_fsdp"], remedy="the old name of ddp.use_megatron_fsdp, use that"),
    Unavailable(
        ["model.enable_cuda_graph", "model.external_cuda_graph"],
        remedy="use model.cuda_graph_impl=local",
    ),
    # Megatron-Core declares these and never reads them
    Unavailable(
        ["model.apply_residual_connection_post_layernorm"],
        remedy="never read, use model.norm_placement",
    ),
    Unavailable(
        ["model.disable_bf16_reduced_precision_matmul"],
        remedy="never read, set torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction in a script",
    ),
    Unavailable(
        ["model.is_hybrid_model"],
        remedy="never read, a MambaModelProvider with hybrid_override_pattern is a hybrid model",
    ),
    Unavailable(
        ["model.moe_token_dropping"], remedy="never read, use model.moe_expert_capacity_factor"
    ),
    Unavailable(
        ["model.moe_router_topk_limited_devices"],
        remedy="never read, use model.moe_router_group_topk",
    ),
    # Megatron-Core would pass forward steps an argument that they do not accept
    Unavailable(
        ["model.num_microbatches_with_partial_activation_checkpoints"],
        remedy="not available in this version, use model.recompute_granularity",
    ),
    # it needs one optimizer per model chunk
    Unavailable(
        ["optimizer.overlap_param_gather_with_optimizer_step"],
        remedy="not available in this version, use ddp.overlap_param_gather=true",
    ),
    Unavailable(
        ["optimizer.use_torch_optimizer_for_cpu_offload"],
        remedy="never read, because the CPU always uses torch's optimizer",
    ),
    Unavailable(["optimizer.main_grads_dtype"], remedy="never read, use ddp.grad_reduce_in_fp32"),
]
UNAVAILABLE = {key: row.remedy for row in _UNAVAILABLE for key in row.settings}
"""Dotted key -> why the setting must keep its default, and what to do instead."""


def attributes_are_fields(config: RunConfig, world_size: int) -> Iterator[str]:
    """A misspelled attribute would be set and never read."""
    for key, block in _blocks(config):
        yield from phantom_attributes(block, key)


def literals_are_known(config: RunConfig, world_size: int) -> Iterator[str]:
    """A misspelled choice would count as another one. Megatron-Core checks the model's choices."""
    for key, block in _blocks(config):
        for name, annotation in (
            field_types(type(block)).items() if block is not config.model else ()
        ):
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
    yield from (
        (key, block) for key, block in vars(config).items() if dataclasses.is_dataclass(block)
    )


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The choices of a ``Literal`` annotation, None included; empty for any other annotation."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    members = [member for member in get_args(annotation) if member is not NoneType]
    if len(members) == 1 and get_origin(members[0]) is Literal:
        return (*get_args(members[0]), None)
    return ()
