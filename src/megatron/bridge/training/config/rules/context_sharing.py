# SPDX-License-Identifier: Apache-2.0
"""Rules on ``model.hybrid_context_parallel``: data-parallel ranks share the samples that are too long for one."""

from collections.abc import Iterator
from typing import Any

from megatron.bridge.backends.specs.layer_specs import resolve_backend
from megatron.bridge.data.config import BlendedDatasetConfig, SFTDatasetConfig
from megatron.bridge.models.features.registry import FEATURES
from megatron.bridge.training.config.resolve.context_sharing import part_multiple
from megatron.bridge.training.config.resolve.data import has_tower
from megatron.bridge.training.config.rules.values import multiple_near, unmet
from megatron.bridge.training.config.run_config import RunConfig

_KEY = "model.hybrid_context_parallel=True"


def shared_samples_fit_the_ranks(config: RunConfig, world_size: int) -> Iterator[str]:
    """Groups of 1, 2, 4, ... ranks take samples, and all ranks together take the longest."""
    model = config.model
    if not model.hybrid_context_parallel:
        return
    ranks = config.data_parallel_size(world_size)
    tokens = model.max_seqlen_per_dp_cp_rank
    if ranks < 2 or ranks & (ranks - 1):
        yield (
            f"{_KEY} with data parallel size {ranks}: groups of ranks double in size, so start a power of two "
            "replicas, at least 2, or switch it off"
        )
    if tokens is None:
        yield (
            f"{_KEY} needs model.max_seqlen_per_dp_cp_rank, the tokens of a microbatch that one rank holds: set it, "
            f"for example to dataset.seq_length / {ranks} = {config.dataset.seq_length // ranks}"
        )
        return
    unit = 2 * part_multiple(config)
    if tokens < unit or tokens % unit:
        yield (
            f"model.max_seqlen_per_dp_cp_rank={tokens} must be a multiple of {unit}, because a rank holds an early "
            f"and a late chunk of a sample: use {multiple_near(tokens, unit)}"
        )
    if ranks * tokens < config.dataset.seq_length:
        yield (
            f"model.max_seqlen_per_dp_cp_rank={tokens} on {ranks} data-parallel ranks holds {ranks * tokens} tokens, "
            f"less than dataset.seq_length={config.dataset.seq_length}: raise it, or start more processes"
        )


def sharing_samples_has_what_it_needs(config: RunConfig, world_size: int) -> Iterator[str]:
    """Plans are made of packed text, and layers other than attention have the groups of the run."""
    model = config.model
    dataset = config.dataset
    if not model.hybrid_context_parallel:
        return
    is_packed = isinstance(dataset, SFTDatasetConfig | BlendedDatasetConfig) and dataset.packed
    other_objectives = (config.dpo, config.distill, config.grpo, getattr(model, "head", None))
    has_other_layers = (
        getattr(model, "hybrid_override_pattern", None)
        or model.experimental_attention_variant
        or model.mtp_num_layers
        or any(feature.recurrent_modules and feature.is_used(model) for feature in FEATURES)
    )
    kinds = model.cp_comm_type if isinstance(model.cp_comm_type, list) else [model.cp_comm_type]
    needs = {
        "records in packed rows (dataset.packed_sequence_specs)": is_packed,
        "dataset.dataloader_type=single": dataset.dataloader_type == "single",
        "train.micro_batch_size=1, because a plan decides what is in a microbatch": (
            config.train.micro_batch_size == 1
            and (config.validation.eval_micro_batch_size or 1) == 1
        ),
        "train.rampup_batch_size=null": config.train.rampup_batch_size is None,
        "model.context_parallel_size=1, because each sample has its own size": (
            model.context_parallel_size == 1
        ),
        "model.cp_comm_type=all_gather or p2p": set(kinds) <= {None, "all_gather", "p2p"},
        "model.calculate_per_token_loss=True": model.calculate_per_token_loss,
        "the backend torch": resolve_backend(model.backend) == "torch",
        "model.cuda_graph_impl=none": model.cuda_graph_impl == "none",
        "supervised training of a text model (no dpo, distill, grpo, model.head or vision tower)": (
            not any(other_objectives) and not has_tower(config)
        ),
        "attention in all layers (no Mamba, linear or sparse attention, no mtp_num_layers)": (
            not has_other_layers
        ),
        "routers without losses (moe_aux_loss_coeff=0, moe_z_loss_coeff=null), which are means of microbatches": (
            not _has_router_losses(model)
        ),
        "model.recompute_modules without mla_up_proj": (
            "mla_up_proj" not in (model.recompute_modules or ())
        ),
        "train.neftune_noise_alpha=null": not config.train.neftune_noise_alpha,
    }
    yield from unmet(_KEY, needs)


def _has_router_losses(model: Any) -> bool:
    if not model.num_moe_experts:
        return False
    coefficients = model.moe_aux_loss_coeff
    balances = any(coefficients) if isinstance(coefficients, list) else bool(coefficients)
    return balances or model.moe_z_loss_coeff is not None
