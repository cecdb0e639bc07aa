# SPDX-License-Identifier: Apache-2.0
"""How the processes of a run start on GPUs: which GPU, which groups, how many queues."""

from datetime import timedelta

import pytest
import torch
from megatron.core import parallel_state

from megatron.bridge.training.config import DistributedInitConfig
from megatron.bridge.training.setup import VARIABLE, initialize, set_connections
from megatron.bridge.utils import distributed
from megatron.bridge.utils.errors import UserError
from tests.toy_run import toy_config

HOPPER, BLACKWELL = (9, 0), (10, 0)


@pytest.mark.parametrize(
    ("local_rank", "visible", "gpu"), [(0, 8, 0), (7, 8, 7), (0, 1, 0), (5, 1, 0)]
)
def test_a_rank_that_sees_only_its_own_gpu_takes_it(local_rank, visible, gpu):
    assert distributed.gpu_of_rank(local_rank, visible) == gpu


def test_more_processes_than_gpus_are_refused():
    with pytest.raises(UserError, match=r"LOCAL_RANK=4.*2 GPUs"):
        distributed.gpu_of_rank(4, 2)


@pytest.mark.usefixtures("one_process")
def test_all_groups_have_the_timeout_of_the_config():
    """Megatron-Core's own default is 30 minutes."""
    config = toy_config(dist=DistributedInitConfig(distributed_timeout_minutes=3))
    initialize(config.resolve().config)
    for group in (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
    ):
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(minutes=3)
    with pytest.raises(AssertionError, match="gloo is not initialized"):
        parallel_state.get_data_parallel_group_gloo()


@pytest.mark.parametrize(
    ("settings", "capability", "expected"),
    [
        ({}, HOPPER, None),
        ({"tensor_model_parallel_size": 2}, HOPPER, "1"),
        ({"context_parallel_size": 2}, HOPPER, "1"),
        ({"tensor_model_parallel_size": 2}, BLACKWELL, None),
        ({"tensor_model_parallel_size": 2, "overlap_moe_expert_parallel_comm": True}, HOPPER, None),
    ],
)
def test_one_queue_where_communication_relies_on_the_order_of_launches(
    settings, capability, expected
):
    environment = {}
    set_connections(toy_config(model=settings), capability, environment)
    assert environment.get(VARIABLE) == expected


def test_fully_sharded_models_and_users_keep_their_queues():
    sharded = toy_config(
        model={"tensor_model_parallel_size": 2}, dist=DistributedInitConfig(use_torch_fsdp2=True)
    )
    split = toy_config(model={"tensor_model_parallel_size": 2})
    for config, environment in ((sharded, {}), (split, {VARIABLE: "8"})):
        before = dict(environment)
        set_connections(config, HOPPER, environment)
        assert environment == before
