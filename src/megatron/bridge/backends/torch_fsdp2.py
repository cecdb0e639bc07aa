# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false
"""PyTorch's fully sharded data parallelism (FSDP2) for Megatron-Core's models.

Each rank of a replica group keeps some whole rows of every parameter, of its gradient and of its optimizer state.
Rows of a layer are gathered before it computes, and given back after. Megatron-Core has a wrapper of its own; it
takes CUDA for granted, leaves gradients without the scale of a loss per token, and describes only even shares to a
checkpoint.
"""

from typing import cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megatron.bridge.backends import fully_sharded
from megatron.bridge.backends.fully_sharded import Marks


class FullyShardedDataParallel(_BaseDataParallel):
    """A chunk whose parameters are cut over the ranks that would hold the same ones.

    Half precision computes in gathered copies: what a rank keeps are the fp32 master weights, so the optimizer
    needs no others. Gradients of each microbatch are summed over ranks, and over microbatches, in fp32.

    Args:
        config: The model's.
        ddp_config: Kept for Megatron-Core, which looks into it.
        module: The chunk, in half precision where the config says so, with equal weights on all ranks.
    """

    def __init__(
        self, config: TransformerConfig, ddp_config: DistributedDataParallelConfig, module: nn.Module
    ) -> None:
        super().__init__(config=config, module=module)
        self.ddp_config = ddp_config
        group = cast(ProcessGroup, parallel_state.get_data_parallel_group(with_context_parallel=True))
        marks = {name: Marks.of(parameter) for name, parameter in module.named_parameters()}
        for parameter in module.parameters():
            parameter.data = parameter.data.float()  # the master weights
        policy = MixedPrecisionPolicy(
            param_dtype=config.params_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        device = next(module.parameters()).device.type
        # torch takes meshes of the same ranks and names for one, also after the groups of the first are gone
        mesh = DeviceMesh.from_group(group, device, mesh_dim_names=(f"replicas_{group.group_name}",))
        for part in (*_units(module), module):
            fully_shard(part, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        for name, parameter in module.named_parameters():
            marks[name].put(parameter, _cuts(parameter.shape[0], group.size()))
        # as Megatron-Core's own wrapper: the gradient of a loss per token is a sum, scaled when tokens are counted
        self._reduce_by(1 if config.calculate_per_token_loss else group.size())

    def _reduce_by(self, divisor: int) -> None:
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(float(divisor))
                part.set_force_sum_reduction_for_comms(True)  # gloo cannot divide

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply this rank's rows of all gradients."""
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                fully_sharded.local(parameter.grad).mul_(scaling_factor)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Nothing: gradients were reduced in the backward pass of each microbatch."""


def _cuts(rows: int, ranks: int) -> tuple[range, ...]:
    """Equal shares, but for the last ranks, which may have fewer rows or none."""
    share = -(-rows // ranks)
    return tuple(range(rows)[rank * share :][:share] for rank in range(ranks))


def _units(module: nn.Module) -> list[nn.Module]:
    """What is gathered at a time, beside the rest: a tied embedding is the output layer, too, and stays there."""
    tied = any(getattr(part, "share_embeddings_and_output_weights", False) for part in module.modules())
    kinds = (TransformerLayer,) if tied else (TransformerLayer, LanguageModelEmbedding)
    return [part for part in module.modules() if isinstance(part, kinds)]
