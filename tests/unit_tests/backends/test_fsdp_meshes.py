# SPDX-License-Identifier: Apache-2.0
"""A sharded model never computes with the process groups of an earlier one, though torch reuses their names."""

from typing import cast

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed.tensor import DTensor

from megatron.bridge.backends.fsdp import megatron_fsdp, torch_fsdp2
from megatron.bridge.models import GPTModelProvider
from tests.workers import leave

MEGATRON_CONFIG = megatron_fsdp.resolve_ddp_config(
    DistributedDataParallelConfig(data_parallel_sharding_strategy=megatron_fsdp.SHARD_WEIGHTS),
    replicas=1,
)
WRAPPERS = {
    "torch": (torch_fsdp2.TorchFSDP2Wrapper, DistributedDataParallelConfig()),
    "megatron": (megatron_fsdp.MegatronFSDPWrapper, MEGATRON_CONFIG),
}


@pytest.fixture
def store_folder(tmp_path):
    leave()  # an earlier test in this process may have left its own group
    yield tmp_path
    leave()


def sharded_parameters(kind: str, store) -> list[DTensor]:
    """Parameters of a small model in a new world of one process, whose groups are named as in the last one."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    provider = GPTModelProvider(
        num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=32, backend="torch"
    )
    (chunk,) = provider.provide_distributed_model(wrap_with_ddp=False)
    wrapper, ddp_config = WRAPPERS[kind]
    wrapped = wrapper(chunk.config, ddp_config, chunk)
    return [cast(DTensor, parameter) for parameter in wrapped.parameters()]


@pytest.mark.parametrize("first", WRAPPERS)
@pytest.mark.parametrize("second", WRAPPERS)
def test_meshes_keep_to_the_groups_of_their_own_world(store_folder, first, second):
    earlier = sharded_parameters(first, store_folder / "first")
    meshes = [parameter.device_mesh for parameter in earlier]
    leave()

    for parameter in sharded_parameters(second, store_folder / "second"):
        assert all(parameter.device_mesh != mesh for mesh in meshes)
        groups = parameter.device_mesh.get_all_groups()
        assert all(dist.get_process_group_ranks(group) == [0] for group in groups)
