# SPDX-License-Identifier: Apache-2.0
"""Where Megatron-FSDP will put parameters, and what it is told; that it does so is in the functional tests."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig as CoreConfig
from torch import nn

from megatron.bridge.backends.cpu import device
from megatron.bridge.backends.fsdp.megatron_fsdp import (
    FlatBuffer,
    flat_buffers,
    resolve_ddp_config,
    row_ranges,
    temporary_elements,
)
from megatron.bridge.utils.errors import UserError

BOTH_WIDTHS = {"fc1": (12, 4), "fc2": (4, 6), "norm": (4,), "bias": (7,)}


def laid_out(shapes, replicas, **options):
    module = nn.ParameterDict(
        {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    )
    config = resolve_ddp_config(
        CoreConfig(data_parallel_sharding_strategy="optim", **options), replicas
    )
    return module, config


@pytest.mark.parametrize("bucket_size", [None, 1])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 8])
def test_every_row_is_kept_by_one_rank(replicas, bucket_size):
    module, config = laid_out(BOTH_WIDTHS, replicas, bucket_size=bucket_size)
    cuts = row_ranges(module, config, replicas)
    assert {name: [row for rows in cut for row in rows] for name, cut in cuts.items()} == {
        name: list(range(shape[0])) for name, shape in BOTH_WIDTHS.items()
    }
    buffers = list(flat_buffers(module, config, replicas))
    assert len(buffers) == (4 if bucket_size else 1)
    kept = [
        sum(len(cut[rank]) * module[name][:1].numel() for name, cut in cuts.items())
        for rank in range(replicas)
    ]
    assert max(kept) <= sum(buffer.size for buffer in buffers) // replicas


def test_a_cut_inside_a_row_is_refused_by_name():
    # the last two are smaller than a row of the first; the third part begins at 200, in a row of the last
    shapes = {"wide": (1, 100), "first": (10, 9), "second": (10, 9)}
    module, config = laid_out(shapes, 4)
    with pytest.raises(
        UserError, match=r"use_megatron_fsdp=True.* second of shape \(10, 9\).*use_torch_fsdp2=true"
    ):
        row_ranges(module, config, 4)


def test_nothing_is_cut_without_a_strategy():
    with pytest.raises(UserError, match=r"strategy=no_shard .*use one of optim, optim_grads"):
        resolve_ddp_config(CoreConfig(data_parallel_sharding_strategy="no_shard"), 2)


@pytest.mark.parametrize(
    ("ahead", "gathered", "reduced"),
    [
        (None, 10 + 3 * 30, 100),  # all of it: less than what is let be under way
        (1, 10 + 30, 30 + 1),
        (20, 10 + 30 + 10, 30 + 20),
    ],
)
def test_what_is_under_way(ahead, gathered, reduced):
    buffers = [FlatBuffer([], [], 10, None)]
    buffers += [FlatBuffer([], [], size, unit) for unit in range(3) for size in (20, 10)]
    buffers.append(FlatBuffer([], [], 0, None))
    found = temporary_elements(CoreConfig(suggested_communication_unit_size=ahead), buffers)
    assert (found.gathered, found.reduced) == (gathered, reduced)


@pytest.mark.skipif(device.has_cuda(), reason="for machines without a GPU")
def test_only_its_own_module_sees_another_device_function():
    from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp

    assert megatron_fsdp.torch.device("cuda:cpu") == torch.device("cpu")
    assert megatron_fsdp.torch.nn is torch.nn
    assert isinstance(torch.device, type)
