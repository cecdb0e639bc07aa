# SPDX-License-Identifier: Apache-2.0
"""What a GPU holds beside tensors: driver, libraries, NCCL, fragments; ``reserve.yaml`` has sizes and origins."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.config import yaml_text

_TABLE = yaml_text.tables_beside(__file__)
_MEASURED = "H100 80GB"


@dataclass(frozen=True)
class Reserve:
    """Bytes by what holds them, and the part of the tensors' bytes that is lost to fragmentation."""

    fixed: dict[str, int]
    share: float = _TABLE["fragmentation"]

    def around(self, tensors: float) -> int:
        """Bytes of a GPU for ``tensors`` bytes of tensors."""
        return sum(self.fixed.values()) + int((1 + self.share) * tensors)

    def inside(self, needed: int) -> int:
        """Bytes of tensors on a GPU that needs ``needed`` bytes."""
        return int((needed - sum(self.fixed.values())) / (1 + self.share))

    def lines(self, needed: int, card: str) -> Iterator[str]:
        """The parts of ``needed`` bytes, one a line."""
        tensors = self.inside(needed)
        lost = f"fragmentation ({self.share:.0%} of tensors, assumed)"
        for name, size in {"tensors": tensors, **self.fixed, lost: int(self.share * tensors)}.items():
            yield f"  {size / 1e9:5.1f} GB  {name}"
        if self.fixed and card not in _TABLE["cards"]:
            yield f"  not measured on {card}: context, libraries and NCCL are those of {_MEASURED}"


def reserve_of(config: ConfigContainer, world_size: int, card: str) -> Reserve:
    """Of a rank of a resolved config on a GPU named ``card``."""
    row, count = dict(_TABLE["cards"].get(card, _TABLE["cards"][_MEASURED])), communicators(config, world_size)
    nccl = row.pop("first") + (count - 1) * row.pop("further")
    return Reserve({**row, f"NCCL, {count} communicators": nccl})


def communicators(config: ConfigContainer, world_size: int) -> int:
    """Groups in which a rank sends messages; NCCL connects each at its first message, one of a single rank too.

    All ranks together, copies (tokens, gradients), stages (number of tokens) and the gradient norm have a group each.
    """
    model: Any = config.model
    tensor, context = model.tensor_model_parallel_size, model.context_parallel_size
    tied = model.share_embeddings_and_output_weights or model.mtp_num_layers
    found = 3 + (tensor > 1) + (context > 1) + (model.pipeline_model_parallel_size > 1 and bool(tied))
    found += 2 * bool(model.overlap_p2p_comm)  # messages outside a batch have a communicator for each neighbor
    found += 2 * (config.ddp.num_distributed_optimizer_instances > 1)
    if not model.num_moe_experts:
        return found + (world_size > 1)
    expert, expert_tensor = model.expert_model_parallel_size, model.expert_tensor_ranks
    found += 1 + (tensor * context > 1) + bool(model.moe_router_enable_expert_bias)  # both balance experts
    found += (expert > 1) + (expert_tensor > 1) + (expert * expert_tensor > 1)
    if expert == 1 and expert_tensor == tensor:
        return found
    return found + (1 if config.ddp.use_distributed_optimizer else 2)  # copies of experts, their gradient norm
