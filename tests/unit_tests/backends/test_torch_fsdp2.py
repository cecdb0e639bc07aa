# SPDX-License-Identifier: Apache-2.0
"""FSDP2 shards a model unit by unit, so that a GPU never holds all of it in fp32."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from torch.distributed.tensor import DTensor

from megatron.bridge.backends.fsdp import torch_fsdp2
from megatron.bridge.models import GPTModelProvider

pytestmark = pytest.mark.usefixtures("one_rank")
LAYERS = 4


def test_one_unit_at_a_time_is_whole_in_fp32(monkeypatch):
    provider = GPTModelProvider(
        num_layers=LAYERS,
        hidden_size=16,
        num_attention_heads=2,
        vocab_size=32,
        bf16=True,
        backend="torch",
    )
    (chunk,) = provider.provide_distributed_model(wrap_with_ddp=False)
    shard, whole = torch_fsdp2.fully_shard, []

    def observed(part, **options):
        wide = [
            name
            for name, parameter in chunk.named_parameters()
            if parameter.dtype is torch.float32 and not isinstance(parameter, DTensor)
        ]
        whole.append(
            {name.split(".layers.")[-1].split(".")[0] for name in wide if ".layers." in name}
        )
        return shard(part, **options)

    monkeypatch.setattr(torch_fsdp2, "fully_shard", observed)
    torch_fsdp2.TorchFSDP2Wrapper(chunk.config, DistributedDataParallelConfig(), chunk)
    assert [len(layers) for layers in whole if layers] == [1] * LAYERS
    assert all(isinstance(parameter, DTensor) for parameter in chunk.parameters())
    assert {parameter.dtype for parameter in chunk.parameters()} == {torch.float32}
