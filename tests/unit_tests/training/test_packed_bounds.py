# SPDX-License-Identifier: Apache-2.0
"""Layers read the bounds of packed samples on the host without asking the device, which would stop its queue."""

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.bridge.backends.attention import block_mask
from megatron.bridge.backends.recurrent import mamba
from megatron.bridge.training.gpt_step import on_device

BOUNDS = [0, 5, 12]


@pytest.fixture
def copies(monkeypatch):
    """The tensors whose values were copied to the host."""
    found, tolist = [], torch.Tensor.tolist

    def observed(tensor):
        found.append(tensor)
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", observed)
    return found


def read_as_layers_do(bounds):
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    for _ in range(3):
        queries, keys = block_mask.packed_segments(packed)
        assert [part.length for part in queries] == [part.length for part in keys] == [5, 7]
        assert mamba.lengths_of(packed, 14) == [5, 7, 2]


def test_the_batch_brings_them(copies):
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    batch = on_device({"cu_seqlens": bounds, "max_seqlen": 7})
    assert all(tensor is bounds for tensor in copies), "only the batch on the host may be read"
    copies.clear()
    read_as_layers_do(batch["cu_seqlens"])
    assert not copies


def test_other_bounds_are_read_once(copies):
    read_as_layers_do(torch.tensor(BOUNDS))
    assert len(copies) == 1


def test_a_caller_may_change_what_it_got():
    bounds = torch.tensor(BOUNDS)
    block_mask.host_values(bounds).append(99)
    assert block_mask.host_values(bounds) == BOUNDS
