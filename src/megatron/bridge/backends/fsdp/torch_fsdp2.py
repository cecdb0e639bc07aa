# SPDX-License-Identifier: Apache-2.0
"""PyTorch's fully sharded data parallelism (FSDP2) for Megatron-Core's models.

Each rank of a replica group keeps complete rows of every parameter, its gradient and its optimizer state. The rows
of a layer are gathered before it computes and freed after. Megatron-Core's own FSDP2 wrapper requires CUDA, does
not scale gradients for a per-token loss, and can only save even shards.
"""

from itertools import count
from typing import cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.backends.fsdp import sharded_rows
from megatron.bridge.backends.fsdp.sharded_rows import ParameterAttributes, RowRanges

_mesh_numbers = count()  # the prefix keeps names apart from those of Megatron-FSDP


class TorchFSDP2Wrapper(_BaseDataParallel):
    """A model chunk whose parameters are sharded over its replicas.

    Ranks keep fp32 master weights of trained parameters and compute with gathered copies in the precision of the
    model, so the optimizer needs no other copy. Gradients are summed over ranks and microbatches in fp32. Experts
    are sharded over the ranks with the same experts.

    Megatron-Core reads ``ddp_config``. The chunk is in the precision of the config, with equal weights on all
    ranks; it may be in host memory: each unit is moved to the device when it is sharded.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
    ) -> None:
        super().__init__(config=config, module=module)
        self.ddp_config = ddp_config
        group = cast(
            ProcessGroup, parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        attributes = {
            name: ParameterAttributes.of(parameter) for name, parameter in module.named_parameters()
        }
        policy = MixedPrecisionPolicy(
            param_dtype=config.params_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        device = "cuda" if has_cuda() else "cpu"
        # under expert parallelism, the replicas of experts are on other ranks than the replicas of dense weights
        expert_group = cast(ProcessGroup, parallel_state.get_expert_data_parallel_group())
        mesh = _mesh_of_replicas(group, sharded_rows.dense_shards(), device)
        expert_mesh = _mesh_of_replicas(expert_group, sharded_rows.expert_shards(), device)
        experts = _expert_modules(module) if expert_mesh.mesh.tolist() != mesh.mesh.tolist() else []
        for part in (*experts, *_gathered_units(module), module):
            _make_master_weights(part)
            part_mesh = expert_mesh if part in experts else mesh
            fully_shard(part, mesh=part_mesh, reshard_after_forward=True, mp_policy=policy)
        for name, parameter in module.named_parameters():
            ranks = sharded_rows.group_of_rows(cast(DTensor, parameter)).size()
            attributes[name].attach(parameter, _row_ranges(parameter.shape[0], ranks))
        sharded_rows.install_norms()
        # as in Megatron-Core: gradients of a per-token loss are summed, and scaled when the tokens have been
        # counted
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
                sharded_rows.local_rows(parameter.grad).mul_(scaling_factor)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Do nothing: gradients were reduced in the backward pass of each microbatch."""


def _mesh_of_replicas(group: ProcessGroup, shards: ProcessGroup, device: str) -> DeviceMesh:
    """Return a mesh of the replicas in ``group``.

    With several ``ddp.num_distributed_optimizer_instances`` it has two dimensions: copies, and the ranks ``shards``
    of which each has a part of every parameter.
    """
    size = shards.size()
    if size == group.size():
        return _mesh_of_group(group, device)
    copies = sharded_rows.copies()
    number = next(_mesh_numbers)
    names = (f"fsdp2_copies_{number}", f"fsdp2_replicas_{number}")
    rows = sharded_rows.ranks_by_copy(group, shards)
    return DeviceMesh.from_group([copies, shards], device, mesh=rows, mesh_dim_names=names)


def _mesh_of_group(group: ProcessGroup, device: str) -> DeviceMesh:
    # torch reuses a mesh with the same ranks and names, even after its groups are destroyed, and then gives new groups
    # the names of old ones
    names = (f"fsdp2_replicas_{next(_mesh_numbers)}",)
    return DeviceMesh.from_group(group, device, mesh_dim_names=names)


def _expert_modules(module: nn.Module) -> list[nn.Module]:
    return [
        cast(nn.Module, layer.experts) for layer in module.modules() if isinstance(layer, MoELayer)
    ]


def expert_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights of routed experts, which are sharded over other ranks than the rest."""
    return [parameter for experts in _expert_modules(module) for parameter in experts.parameters()]


def _make_master_weights(part: nn.Module) -> None:
    """Convert trained, unsharded parameters to fp32, unit by unit: the full model may not fit on a GPU."""
    for parameter in part.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.float()


def _row_ranges(rows: int, ranks: int) -> RowRanges:
    """Return equal ranges; the last ranks may have fewer rows or none."""
    share = -(-rows // ranks)
    return tuple(range(rows)[rank * share :][:share] for rank in range(ranks))


def _gathered_units(module: nn.Module) -> list[nn.Module]:
    """Return modules that are gathered separately; a tied embedding is also the output layer and is not separate."""
    tied = any(
        getattr(part, "share_embeddings_and_output_weights", False) for part in module.modules()
    )
    layers = (TransformerLayer, MambaLayer)
    kinds = layers if tied else (*layers, LanguageModelEmbedding)
    return [part for part in module.modules() if isinstance(part, kinds)]
