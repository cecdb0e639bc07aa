# SPDX-License-Identifier: Apache-2.0
"""The algebra of mappings against loops that a reader can check by eye."""

from types import SimpleNamespace

import pytest
import torch

from megatron.bridge.models.conversion import param_mapping as pm
from megatron.bridge.models.conversion.param_mapping import ShardSpec


def heads(queries, groups, width=4, **more):
    return SimpleNamespace(
        num_attention_heads=queries,
        num_query_groups=groups,
        kv_channels=width,
        hidden_size=12,
        **more,
    )


def fused_by_hand(config, q, k, v):
    width, per_group = config.kv_channels, config.num_attention_heads // config.num_query_groups
    rows = []
    for group in range(config.num_query_groups):
        rows.append(q[group * per_group * width : (group + 1) * per_group * width])
        rows.append(k[group * width : (group + 1) * width])
        rows.append(v[group * width : (group + 1) * width])
    return torch.cat(rows)


def shards_by_pieces(mapping, whole, shape, kind, size, config):
    """Every rank's shard, built from the whole tensors by the mapping's pieces."""
    shards = []
    for rank in range(size):
        local = torch.zeros(shape)
        for piece in mapping.copy_ranges(ShardSpec(shape, kind, rank, size, config)):
            piece.of_shard(local).copy_(piece.of_hf(whole[piece.hf]))
        shards.append(local)
    return shards


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("queries", "groups"), [(8, 4), (4, 4), (12, 4), (8, 2)])
@pytest.mark.parametrize("columns", [(12,), ()], ids=["weight", "bias"])
def test_qkv_is_cut_like_the_fused_tensor(size, queries, groups, columns):
    config = heads(queries, groups)
    whole = {
        name: torch.randn(rows * 4, *columns)
        for name, rows in zip("qkv", (queries, groups, groups), strict=True)
    }
    fused = fused_by_hand(config, whole["q"], whole["k"], whole["v"])
    mapping = pm.QKVMapping("linear_qkv.weight", q="q", k="k", v="v")
    shape = (len(fused) // size, *columns)

    shards = shards_by_pieces(mapping, whole, shape, "column", size, config)

    for shard, expected in zip(shards, fused.chunk(size), strict=True):
        assert torch.equal(shard, expected)
    back = mapping.join(ShardSpec(shape, "column", 0, size, config), shards)
    for name, tensor in whole.items():
        assert torch.equal(back[name], tensor)


@pytest.mark.parametrize("size", [1, 2])
def test_one_concatenated_qkv_tensor(size):
    config = heads(6, 2)
    q, k, v = (torch.randn(rows * 4, 12) for rows in (6, 2, 2))
    mapping = pm.ConcatenatedQKVMapping("linear_qkv.weight", "qkv")
    shape = (40 // size, 12)
    shards = shards_by_pieces(mapping, {"qkv": torch.cat((q, k, v))}, shape, "column", size, config)
    assert torch.equal(torch.cat(shards), fused_by_hand(config, q, k, v))
    back = mapping.join(ShardSpec(shape, "column", 0, size, config), shards)
    assert torch.equal(back["qkv"], torch.cat((q, k, v)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gated_mlp_holds_gate_above_up_on_each_rank(size):
    gate, up = torch.randn(8, 3), torch.randn(8, 3)
    mapping = pm.GatedMLPMapping("linear_fc1.weight", gate="gate", up="up")
    shards = shards_by_pieces(
        mapping, {"gate": gate, "up": up}, (16 // size, 3), "column", size, None
    )
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, torch.cat((gate.chunk(size)[rank], up.chunk(size)[rank])))


@pytest.mark.parametrize(("kind", "dim"), [("column", 0), ("row", 1)])
def test_column_and_row(kind, dim):
    whole = torch.randn(8, 12)
    cls = pm.ColumnParallelMapping if kind == "column" else pm.RowParallelMapping
    mapping = cls("x.weight", "w")
    expected = whole.chunk(4, dim)
    shape = tuple(expected[0].shape)
    for shard, part in zip(
        shards_by_pieces(mapping, {"w": whole}, shape, kind, 4, None), expected, strict=True
    ):
        assert torch.equal(shard, part)
    assert torch.equal(mapping.join(ShardSpec(shape, kind, 0, 4, None), list(expected))["w"], whole)


def test_a_row_parallel_bias_is_whole_on_every_rank():
    bias = torch.randn(8)
    shards = shards_by_pieces(
        pm.RowParallelMapping("x.bias", "b"), {"b": bias}, (8,), "row", 4, None
    )
    assert all(torch.equal(shard, bias) for shard in shards)


def test_rows_of_vocabulary_padding_are_not_part_of_the_hugging_face_tensor():
    config = SimpleNamespace(vocab_size=10)
    mapping = pm.AutoMapping("embedding.word_embeddings.weight", "embed")
    shards = shards_by_pieces(mapping, {"embed": torch.ones(10, 3)}, (6, 3), "column", 2, config)
    assert mapping.hf_shapes(ShardSpec((6, 3), "column", 0, 2, config)) == {"embed": (10, 3)}
    assert torch.cat(shards).sum() == 30
    assert shards[1][4:].abs().sum() == 0


def test_heads_of_padding_are_left_out():
    config = heads(12, 4, unpadded_heads=(9, 3))
    q, k, v = (torch.randn(rows * 4, 12) for rows in (9, 3, 3))
    mapping = pm.QKVMapping("linear_qkv.weight", q="q", k="k", v="v")
    shape = (2 * (3 + 2) * 4, 12)
    shards = shards_by_pieces(mapping, {"q": q, "k": k, "v": v}, shape, "column", 2, config)
    assert torch.equal(torch.cat(shards)[:60], fused_by_hand(heads(9, 3), q, k, v))
    assert torch.equal(mapping.join(ShardSpec(shape, "column", 0, 2, config), shards)["q"], q)
    output = pm.RowParallelMapping("decoder.layers.0.self_attention.linear_proj.weight", "o")
    assert output.hf_shapes(ShardSpec((12, 24), "row", 0, 2, config)) == {"o": (12, 36)}


def test_merge_and_split_functions_undo_each_other():
    config = heads(6, 2)
    q, k, v = (torch.randn(rows * 4, 12) for rows in (6, 2, 2))
    fused = pm.merge_qkv_weights(config, q, k, v)
    assert torch.equal(fused, fused_by_hand(config, q, k, v))
    assert all(
        torch.equal(*pair)
        for pair in zip(pm.split_qkv_weights(config, fused), (q, k, v), strict=True)
    )
    biases = (q[:, 0], k[:, 0], v[:, 0])
    fused_bias = pm.merge_qkv_biases(config, *biases)
    assert torch.equal(fused_bias, fused[:, 0])
    assert all(
        torch.equal(*pair)
        for pair in zip(pm.split_qkv_biases(config, fused_bias), biases, strict=True)
    )
    kv = pm.merge_kv_weights(config, k, v)
    assert torch.equal(kv, torch.cat((k[:4], v[:4], k[4:], v[4:])))
    assert all(
        torch.equal(*pair) for pair in zip(pm.split_kv_weights(config, kv), (k, v), strict=True)
    )


def test_resolve_fills_wildcards_of_all_names():
    mapping = pm.QKVMapping("layers.*.qkv", q="h.*.q", k="h.*.k", v="h.*.v").resolve(("3",))
    assert mapping.megatron_param == "layers.3.qkv"
    assert mapping.hf_names == ["h.3.q", "h.3.k", "h.3.v"]
    expert = pm.AutoMapping("layers.*.experts.fc2.weight*", "h.*.experts.*.down").resolve(
        ("3", "7")
    )
    assert (expert.megatron_param, expert.hf_param) == (
        "layers.3.experts.fc2.weight7",
        "h.3.experts.7.down",
    )


def test_methods_work_on_a_module_without_process_groups():
    config = heads(6, 2)
    module = torch.nn.Linear(12, 40, bias=False)
    module.config = config
    whole = {role: torch.randn(rows * 4, 12) for role, rows in zip("qkv", (6, 2, 2), strict=True)}
    mapping = pm.QKVMapping("a.linear_qkv.weight", q="Q", k="K", v="V")
    local = mapping.hf_to_megatron(whole, module)
    assert torch.equal(local, fused_by_hand(config, *whole.values()))
    back = mapping.megatron_to_hf(local, module)
    assert {
        name: torch.equal(tensor, whole[name.lower()]) for name, tensor in back.items()
    } == dict.fromkeys("QKV", True)
    assert mapping.megatron_to_hf(None, None) == {}


def test_module_types_can_be_registered():
    class Mine(torch.nn.Linear):
        pass

    module = Mine(4, 4)
    assert pm.parallel_kind(module, module.weight) == "replicated"
    pm.AutoMapping.register_module_type("Mine", "row")
    assert pm.parallel_kind(module, module.weight) == "row"
