# SPDX-License-Identifier: Apache-2.0
"""GPU memory outside of tensors: driver, libraries, NCCL, fragmentation. With sizes and their sources."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.bridge.training.config import ConfigContainer


@dataclass(frozen=True)
class _Card:
    """Bytes in use in addition to the tensors of PyTorch's allocator, as the driver says."""

    context: int  # after CUDA has started
    libraries: int  # more after a matrix product
    first_communicator: int  # more after the first all-reduce
    further_communicator: int  # more after an all-reduce in another group


_MEASURED = "H100 80GB"
# Each was measured in a new process, with groups of one rank, on one H100 with PyTorch 2.11 for CUDA 13.0 (2026-11-26).
# Communicators of several ranks have not been measured. A card without a row takes that of the H100.
_CARDS = {
    _MEASURED: _Card(
        context=619_000_000,
        libraries=74_000_000,
        first_communicator=564_000_000,
        further_communicator=388_000_000,
    ),
}

_FRAGMENTATION = 0.05
"""What the allocator has reserved and cannot use, as a part of the tensors. An ASSUMPTION, not measured.

It holds for PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, with which a segment grows by pages of 2 MiB (20 MiB for
large ones), and none is added to those that are too small (notes on CUDA semantics, docs.pytorch.org). Without
it, up to 43 % were seen with virtual stages and recomputation (STAlloc, arXiv 2507.16274).
"""


@dataclass(frozen=True)
class Reserve:
    """Bytes by name of what holds them, and the fraction of tensor bytes that fragmentation adds."""

    fixed: dict[str, int]
    share: float = _FRAGMENTATION

    def around(self, tensors: float) -> int:
        """Return the bytes of a GPU that ``tensors`` bytes of tensors need."""
        return sum(self.fixed.values()) + int((1 + self.share) * tensors)

    def inside(self, needed: int) -> int:
        """Return the bytes of tensors on a GPU that needs ``needed`` bytes."""
        return int((needed - sum(self.fixed.values())) / (1 + self.share))

    def lines(self, needed: int, card: str) -> Iterator[str]:
        """Yield the parts of ``needed`` bytes, one per line."""
        tensors = self.inside(needed)
        lost = f"fragmentation ({self.share:.0%} of tensors, assumed)"
        for name, size in {
            "tensors": tensors,
            **self.fixed,
            lost: int(self.share * tensors),
        }.items():
            yield f"  {size / 1e9:5.1f} GB  {name}"
        if self.fixed and card not in _CARDS:
            yield f"  not measured on {card}: context, libraries and NCCL are the values for {_MEASURED}"


def reserve_of(config: ConfigContainer, world_size: int, card: str) -> Reserve:
    """Return the reserve of a rank of a resolved config on a GPU named ``card``."""
    measured = _CARDS.get(card, _CARDS[_MEASURED])
    count = communicators(config, world_size)
    nccl = measured.first_communicator + (count - 1) * measured.further_communicator
    fixed = {
        "CUDA context": measured.context,
        "libraries": measured.libraries,
        f"NCCL, {count} communicators": nccl,
    }
    return Reserve(fixed)


def communicators(config: ConfigContainer, world_size: int) -> int:
    """Count the groups in which a rank sends messages; NCCL connects each at its first message, even a single rank.

    The world, data parallelism (tokens, gradients), the pipeline (token count) and the gradient norm have one each.
    """
    model: Any = config.model
    tensor = model.tensor_model_parallel_size
    context = model.context_parallel_size
    tied = model.share_embeddings_and_output_weights or model.mtp_num_layers
    ties_stages = model.pipeline_model_parallel_size > 1 and bool(tied)
    count = 3 + sum([tensor > 1, context > 1, ties_stages])
    # unbatched messages use a communicator for each of two neighbors
    count += 2 if model.overlap_p2p_comm else 0
    count += 2 if config.ddp.num_distributed_optimizer_instances > 1 else 0
    if model.hybrid_context_parallel:
        # groups of 2, 4, ... ranks, of which the largest is that of the gradients
        count += config.data_parallel_size(world_size).bit_length() - 2
    if not model.num_moe_experts:
        return count + (world_size > 1)
    expert = model.expert_model_parallel_size
    expert_tensor = model.expert_tensor_ranks
    balances_bias = bool(model.moe_router_enable_expert_bias)
    count += 1 + sum([tensor * context > 1, balances_bias])
    count += sum([expert > 1, expert_tensor > 1, expert * expert_tensor > 1])
    if expert == 1 and expert_tensor == tensor:
        return count
    # data parallelism of experts and, unless the optimizer has one of its own, their gradient norm
    return count + (1 if config.ddp.use_distributed_optimizer else 2)
