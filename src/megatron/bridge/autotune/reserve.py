# SPDX-License-Identifier: Apache-2.0
"""GPU memory outside of tensors: driver, libraries, NCCL, fragmentation. ``reserve.yaml`` has sizes and sources."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.config import yaml_text

_TABLE = yaml_text.tables_beside(__file__)
_MEASURED = "H100 80GB"


@dataclass(frozen=True)
class Reserve:
    """Bytes by name of what holds them, and the fraction of tensor bytes that fragmentation adds."""

    fixed: dict[str, int]
    share: float = _TABLE["fragmentation"]

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
        if self.fixed and card not in _TABLE["cards"]:
            yield f"  not measured on {card}: context, libraries and NCCL are the values for {_MEASURED}"


def reserve_of(config: ConfigContainer, world_size: int, card: str) -> Reserve:
    """Return the reserve of a rank of a resolved config on a GPU named ``card``."""
    row, count = (
        dict(_TABLE["cards"].get(card, _TABLE["cards"][_MEASURED])),
        communicators(config, world_size),
    )
    nccl = row.pop("first") + (count - 1) * row.pop("further")
    return Reserve({**row, f"NCCL, {count} communicators": nccl})


def communicators(config: ConfigContainer, world_size: int) -> int:
    """Count the groups in which a rank sends messages; NCCL connects each at its first message, even a single rank.

    The world, data parallelism (tokens, gradients), the pipeline (token count) and the gradient norm have one each.
    """
    model: Any = config.model
    tensor, context = model.tensor_model_parallel_size, model.context_parallel_size
    tied = model.share_embeddings_and_output_weights or model.mtp_num_layers
    count = 3
    if tensor > 1:
        count += 1
    if context > 1:
        count += 1
    if model.pipeline_model_parallel_size > 1 and tied:
        count += 1
    if model.overlap_p2p_comm:  # unbatched messages use a communicator for each neighbor
        count += 2
    if config.ddp.num_distributed_optimizer_instances > 1:
        count += 2
    if not model.num_moe_experts:
        return count + 1 if world_size > 1 else count
    expert, expert_tensor = model.expert_model_parallel_size, model.expert_tensor_ranks
    count += 1
    if tensor * context > 1:  # balances experts, as the next one does
        count += 1
    if model.moe_router_enable_expert_bias:
        count += 1
    for size in (expert, expert_tensor, expert * expert_tensor):
        if size > 1:
            count += 1
    if expert == 1 and expert_tensor == tensor:
        return count
    # data parallelism of experts and, unless the optimizer has one of its own, their gradient norm
    return count + (1 if config.ddp.use_distributed_optimizer else 2)
