# SPDX-License-Identifier: Apache-2.0
"""Experts in mappings, plans and files, without processes: stacked tensors, numbers of other ranks, precision."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.bridge.models.conversion import param_mapping as pm
from megatron.bridge.models.conversion.declare.moe import expert_names
from megatron.bridge.models.conversion.engine import buckets, exchange, export, load, plan
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import ShardSpec
from megatron.bridge.models.hf_pretrained.safetensors_files import SafetensorsCheckpoint
from megatron.bridge.utils.errors import UserError

EXPERTS, HIDDEN, WIDTH = 3, 5, 8
CONFIG = SimpleNamespace(num_moe_experts=EXPERTS, share_embeddings_and_output_weights=False)


def concatenated(tensor):
    """[gate; up] of one expert."""
    return tensor.chunk(2)


def interleaved(tensor):
    """Rows of gate and up in turn."""
    return tensor[::2], tensor[1::2]


KINDS = {
    "concatenated": (pm.ConcatenatedGatedMLPMapping, concatenated),
    "interleaved": (pm.InterleavedGatedMLPMapping, interleaved),
}


def of_expert(mapping, expert):
    return mapping.resolve(("0", str(expert)))


def loaded(mapping, stored, shape, kind, size):
    """Every rank's shard, read from a file piece by piece."""
    shards = []
    for rank in range(size):
        shard = torch.full(shape, torch.nan)
        for piece in mapping.copy_ranges(ShardSpec(shape, kind, rank, size, CONFIG)):
            stored.copy(piece.hf, piece.hf_index, piece.of_shard(shard))
        shards.append(shard)
    return shards


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gate_and_up_of_one_expert_of_a_stack(tmp_path, kind, transposed, size):
    cls, parts = KINDS[kind]
    whole = (
        torch.randn(EXPERTS, HIDDEN, 2 * WIDTH)
        if transposed
        else torch.randn(EXPERTS, 2 * WIDTH, HIDDEN)
    )
    save_file({"h.0.gate_up": whole}, tmp_path / "model.safetensors")
    mapping = of_expert(cls(expert_names("linear_fc1")[0], "h.*.gate_up").stacked(transposed), 1)
    assert mapping.megatron_param == "decoder.layers.0.mlp.experts.linear_fc1.weight1"
    shape = (2 * WIDTH // size, HIDDEN)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    shards = loaded(mapping, checkpoint, shape, "column", size)
    assert checkpoint.bytes_read == whole[1].nbytes  # nothing of the other experts
    gate, up = parts(whole[1].T if transposed else whole[1])
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, torch.cat((gate.chunk(size)[rank], up.chunk(size)[rank])))
    described = ShardSpec(shape, "column", 0, size, CONFIG)
    assert mapping.hf_shapes(described) == {"h.0.gate_up": tuple(whole.shape)}
    assert torch.equal(mapping.join(described, shards)["h.0.gate_up"], whole[1])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_output_projection_of_one_expert_of_a_stack(tmp_path, transposed, size):
    whole = (
        torch.randn(EXPERTS, WIDTH, HIDDEN) if transposed else torch.randn(EXPERTS, HIDDEN, WIDTH)
    )
    save_file({"h.0.down": whole}, tmp_path / "model.safetensors")
    mapping = of_expert(
        pm.AutoMapping(expert_names("linear_fc2")[1], "h.*.down").stacked(transposed), 2
    )
    assert (
        mapping.megatron_param == "decoder.layers.0.mlp.experts.local_experts.2.linear_fc2.weight"
    )
    shape = (HIDDEN, WIDTH // size)
    shards = loaded(mapping, SafetensorsCheckpoint(tmp_path), shape, "row", size)
    expected = (whole[2].T if transposed else whole[2]).chunk(size, dim=1)
    assert all(torch.equal(*pair) for pair in zip(shards, expected, strict=True))
    assert torch.equal(
        mapping.join(ShardSpec(shape, "row", 0, size, CONFIG), shards)["h.0.down"], whole[2]
    )


def test_interleaved_biases_of_a_stack(tmp_path):
    whole = torch.randn(EXPERTS, 2 * WIDTH)
    save_file({"h.0.bias": whole}, tmp_path / "model.safetensors")
    mapping = of_expert(
        pm.InterleavedGatedMLPMapping(expert_names("linear_fc1", "bias")[0], "h.*.bias").stacked(),
        0,
    )
    (shard,) = loaded(mapping, SafetensorsCheckpoint(tmp_path), (2 * WIDTH,), "column", 1)
    assert torch.equal(shard, torch.cat((whole[0, ::2], whole[0, 1::2])))


def test_a_mapping_computes_a_shard_of_a_stack_from_whole_tensors():
    whole = torch.randn(EXPERTS, HIDDEN, 2 * WIDTH)
    module = torch.nn.Module()
    module.weight2 = torch.nn.Parameter(torch.empty(2 * WIDTH, HIDDEN))
    module.config = CONFIG
    mapping = of_expert(
        pm.InterleavedGatedMLPMapping(expert_names("linear_fc1")[0], "h.*.x").stacked(True), 2
    )
    made = mapping.hf_to_megatron(whole, module)
    assert torch.equal(made, torch.cat((whole[2].T[::2], whole[2].T[1::2])))
    assert torch.equal(mapping.megatron_to_hf(made, module)["h.0.x"], whole[2])


@pytest.mark.parametrize("size", [1, 2])
def test_gate_and_up_together_in_a_dense_layer(size):
    gate, up = torch.randn(WIDTH, HIDDEN), torch.randn(WIDTH, HIDDEN)
    mapping = pm.ConcatenatedGatedMLPMapping("linear_fc1.weight", "gate_up")
    shape = (2 * WIDTH // size, HIDDEN)
    shards = [
        torch.cat(
            [
                piece.of_hf(torch.cat((gate, up)))
                for piece in mapping.copy_ranges(ShardSpec(shape, "column", r, size, None))
            ]
        )
        for r in range(size)
    ]
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, torch.cat((gate.chunk(size)[rank], up.chunk(size)[rank])))
    assert torch.equal(
        mapping.join(ShardSpec(shape, "column", 0, size, None), shards)["gate_up"],
        torch.cat((gate, up)),
    )


# ---- plans: the experts of other ranks ----


class Linear(torch.nn.Module):
    """Parameters of some experts, and the config that conversion asks for."""

    def __init__(self, names):
        super().__init__()
        self.config = CONFIG
        for name in names:
            self.register_parameter(name, torch.nn.Parameter(torch.randn(2, 2)))


def toy(spelling, local):
    """A model of one layer with ``local`` of its experts here."""
    layer = torch.nn.Module()
    layer.layer_number = 3  # of the model: it is the first of this stage
    layer.mlp = torch.nn.Module()
    if spelling == "grouped":
        experts = torch.nn.Module()
        for linear in ("linear_fc1", "linear_fc2"):
            setattr(experts, linear, Linear([f"weight{i}" for i in range(local)]))
    else:
        experts = torch.nn.Module()
        experts.local_experts = torch.nn.ModuleList(torch.nn.Module() for _ in range(local))
        for expert in experts.local_experts:
            expert.linear_fc1, expert.linear_fc2 = Linear(["weight"]), Linear(["weight"])
    layer.mlp.experts = experts
    layer.mlp.router = Linear(["weight"])
    chunk = torch.nn.Module()
    chunk.config = SimpleNamespace(num_moe_experts=6, share_embeddings_and_output_weights=False)
    chunk.decoder = torch.nn.Module()
    chunk.decoder.layers = torch.nn.ModuleList([layer])
    return chunk


REGISTRY = MegatronMappingRegistry(
    pm.AutoMapping("decoder.layers.*.mlp.router.weight", "h.*.gate"),
    *(
        pm.AutoMapping(name, f"h.*.experts.*.{hf}")
        for linear, hf in (("linear_fc1", "up"), ("linear_fc2", "down"))
        for name in expert_names(linear)
    ),
)
GROUP = object()


@pytest.fixture
def second_of_three(monkeypatch):
    """This process as the second of three ranks that share out six experts."""
    monkeypatch.setattr(exchange, "expert_group", lambda: GROUP)
    monkeypatch.setattr(
        exchange, "rank_and_size", lambda group: (1, 3) if group is GROUP else (0, 1)
    )


@pytest.mark.parametrize("spelling", ["grouped", "sequential"])
def test_every_rank_plans_for_all_experts_and_holds_its_own(second_of_three, spelling):
    model = toy(spelling, local=2)
    tasks = plan.build_plan(REGISTRY, [model]).tasks
    assert sorted(task.mapping.hf_param for task in tasks) == sorted(
        [
            "h.2.gate",
            *(f"h.2.experts.{expert}.{hf}" for expert in range(6) for hf in ("up", "down")),
        ]
    )
    mine = {
        task.mapping.hf_param: task.param_weight for task in tasks if task.param_weight is not None
    }
    assert sorted(mine) == sorted(
        ["h.2.gate", *(f"h.2.experts.{e}.{hf}" for e in (2, 3) for hf in ("up", "down"))]
    )
    parameters = dict(model.named_parameters())
    for task in tasks:
        expert = task.mapping.hf_param.split(".")[3] if task.ep_rank is not None else None
        assert task.ep_rank == (int(expert) // 2 if expert else None)
        if expert in ("2", "3"):
            assert task.param_weight is parameters[task.param_name]


@pytest.mark.parametrize("spelling", ["grouped", "sequential"])
def test_experts_come_in_their_order(second_of_three, spelling):
    names = [
        task.mapping.hf_param for task in plan.build_plan(REGISTRY, [toy(spelling, local=2)]).tasks
    ]
    for linear in ("up", "down"):
        assert [name for name in names if name.endswith(linear)] == [
            f"h.2.experts.{e}.{linear}" for e in range(6)
        ]


def test_a_tensor_of_all_experts_is_read_and_written_expert_by_expert(tmp_path):
    experts = torch.nn.Module()
    experts.linear_fc1 = Linear([f"weight{i}" for i in range(EXPERTS)])
    chunk = torch.nn.Module()
    chunk.config = CONFIG
    chunk.experts = experts
    mapping = pm.ConcatenatedGatedMLPMapping("experts.linear_fc1.weight*", "gate_up").stacked(
        transposed=True
    )
    source = tmp_path / "source"
    source.mkdir()
    whole = torch.randn(EXPERTS, 2, 2)
    save_file({"gate_up": whole}, source / "model.safetensors")
    checkpoint, bridge = SafetensorsCheckpoint(source), MegatronModelBridge()
    made = plan.build_plan(MegatronMappingRegistry(mapping), [chunk], checkpoint.entries)
    load.load(bridge, made, checkpoint)
    assert torch.equal(experts.linear_fc1.weight1, whole[1].T)
    ((_, (name, streamed)),) = buckets.stream(bridge, made)
    assert name == "gate_up"
    assert torch.equal(streamed, whole)
    out = tmp_path / "out"
    out.mkdir()
    export.save(bridge, made, out, checkpoint, export.SaveOptions())
    assert (out / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert torch.equal(load_file(out / "model.safetensors")["gate_up"], whole)
    with pytest.raises(UserError, match="leave out experts of gate_up"):
        list(buckets.stream(bridge, plan.ConversionPlan(made.tasks[:2])))


def test_a_stack_of_another_number_of_experts_is_refused(tmp_path):
    chunk = torch.nn.Module()
    chunk.config = CONFIG
    chunk.experts = torch.nn.Module()
    chunk.experts.linear_fc1 = Linear([f"weight{i}" for i in range(EXPERTS)])
    mapping = pm.AutoMapping("experts.linear_fc1.weight*", "up").stacked()
    save_file({"up": torch.randn(EXPERTS + 1, 2, 2)}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    made = plan.build_plan(MegatronMappingRegistry(mapping), [chunk], checkpoint.entries)
    with pytest.raises(UserError, match=r"has shape \[4, 2, 2\], the config requires \[3, 2, 2\]"):
        load.load(MegatronModelBridge(), made, checkpoint)
