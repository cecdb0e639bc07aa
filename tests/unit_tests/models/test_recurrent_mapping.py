# SPDX-License-Identifier: Apache-2.0
"""Mappings of recurrent layers against Megatron's and transformers' own ways of splitting a projection."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.ssm.gated_delta_net import gdn
from torch import nn
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from megatron.bridge.models.conversion.mappings import recurrent as rm
from megatron.bridge.models.conversion.param_mapping import ShardSpec

MAMBA = SimpleNamespace(
    hidden_size=10, mamba_num_heads=4, mamba_head_dim=3, mamba_num_groups=2, mamba_state_dim=5
)
GDN = SimpleNamespace(
    linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=3, linear_value_head_dim=2
)


def shards_of(mapping, whole, rows, size, config):
    """Every rank's shard, and the whole tensors put together from them."""
    shape = (rows // size, *next(iter(whole.values())).shape[1:])
    shards = []
    for rank in range(size):
        local = torch.full(shape, torch.nan)
        for piece in mapping.copy_ranges(ShardSpec(shape, "column", rank, size, config)):
            piece.of_shard(local).copy_(piece.of_hf(whole[piece.hf]))
        assert not local.isnan().any()
        shards.append(local)
    back = mapping.join(ShardSpec(shape, "column", 0, size, config), shards)
    assert {name: tensor.shape for name, tensor in back.items()} == {
        n: t.shape for n, t in whole.items()
    }
    assert all(torch.equal(back[name], tensor) for name, tensor in whole.items())
    return shards


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("mapping", "kinds"),
    [
        (rm.MambaInProjMapping("in_proj.weight", "hf"), [12, 12, 10, 10, 4]),
        (rm.MambaConv1dMapping("conv1d_weight", "hf"), [12, 10, 10]),
    ],
)
def test_each_kind_of_mamba_features_is_cut_by_itself(mapping, kinds, size):
    """The sizes are those of transformers' split of a Mamba-2 projection: gate, inputs, B, C, time steps."""
    whole = torch.randn(sum(kinds), 7)
    shards = shards_of(mapping, {"hf": whole}, len(whole), size, MAMBA)
    parts = [kind.chunk(size) for kind in whole.split(kinds)]
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, torch.cat([part[rank] for part in parts]))


def test_heads_of_mamba_follow_from_the_width_unless_given():
    config = SimpleNamespace(**{**vars(MAMBA), "hidden_size": 6, "mamba_num_heads": None})
    assert rm.MambaConv1dMapping("conv1d_weight", "hf").segments(config) == (12, 10, 10)


def delta_net():
    config = Qwen3NextConfig(
        hidden_size=7, num_hidden_layers=1, layer_types=["linear_attention"], **vars(GDN)
    )
    return Qwen3NextGatedDeltaNet(config, 0)


@pytest.mark.parametrize("size", [1, 2])
def test_gated_delta_net_projects_the_same_features(size):
    """Megatron's shard times an input equals what transformers sorts out of its two projections."""
    reference = delta_net()
    whole = {"qkvz": reference.in_proj_qkvz.weight.data, "ba": reference.in_proj_ba.weight.data}
    mapping = rm.GDNLinearMapping("in_proj.weight", qkvz="qkvz", ba="ba")
    shards = shards_of(mapping, whole, sum(map(len, whole.values())), size, GDN)

    x = torch.randn(1, 4, 7)
    query, key, value, z, b, a = reference.fix_query_key_value_ordering(
        reference.in_proj_qkvz(x), reference.in_proj_ba(x)
    )
    kinds = [kind.flatten(2).chunk(size, dim=-1) for kind in (query, key, value, z, b, a)]
    for rank, shard in enumerate(shards):
        assert torch.allclose(
            x @ shard.T, torch.cat([kind[rank] for kind in kinds], dim=-1), atol=1e-6
        )


def test_gated_delta_net_kinds_come_in_megatrons_order():
    layer = SimpleNamespace(
        num_value_heads=6,
        qk_dim_local_tp=6,
        v_dim_local_tp=12,
        num_v_heads_local_tp=6,
        tp_size=1,
        cp_size=1,
        config=SimpleNamespace(deterministic_mode=True),
    )
    gdn.GatedDeltaNet._setup_variant_attrs(layer)
    assert layer.in_proj_split_names == ["query", "key", "value", "z", "beta", "alpha"]
    assert layer.in_proj_split_sections == (6, 6, 12, 12, 6, 6)


def test_gated_delta_net_convolution_is_cut_like_its_features():
    whole = torch.randn(24, 1, 4)
    shards = shards_of(rm.GDNConv1dMapping("conv1d.weight", "hf"), {"hf": whole}, 24, 2, GDN)
    query, key, value = whole.split([6, 6, 12])
    assert torch.equal(shards[1], torch.cat([query[3:], key[3:], value[6:]]))


def test_zero_centred_norm_there_and_back():
    mapping = rm.RMSNorm2ZeroCenteredRMSNormMapping("norm.weight", "hf")
    weight = torch.tensor([1.0, 0.5, 2.0])
    stored = mapping.hf_to_megatron(weight, nn.Identity())
    assert torch.equal(stored, torch.tensor([0.0, -0.5, 1.0]))
    assert torch.equal(mapping.megatron_to_hf(stored, nn.Identity())["hf"], weight)
    assert mapping.megatron_to_hf(None, None) == {}
