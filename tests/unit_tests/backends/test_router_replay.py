# SPDX-License-Identifier: Apache-2.0
"""Recorded experts in the training forward pass, and Megatron-Core's own replay as the reference."""

import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from megatron.bridge.backends.moe.router_replay import ExpertReplay
from megatron.bridge.utils.errors import UserError
from tests.families import harness, routing

FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 2,
}
EXPERTS = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


@pytest.mark.parametrize("recompute", [{}, FULL, EXPERTS], ids=["no", "full", "experts"])
def test_microbatches_choose_their_experts_also_when_recomputed(family_case, recompute):
    case = family_case("qwen3_moe")
    experts = routing.random_experts(case)
    losses, gradients, maps = routing.train_with_experts(case, "one", experts, **recompute)
    plain = routing.train_with_experts(case, "one", experts)
    assert losses == plain[0]
    assert all(torch.equal(gradients[layer], plain[1][layer]) for layer in plain[1])
    for index, layer in enumerate((2, 3, 4)):
        calls = maps[layer]
        expected = [*experts] if not recompute else [experts[0], experts[0], experts[1], experts[1]]
        assert len(calls) == len(expected)
        for chosen, row in zip(calls, expected, strict=True):
            assert torch.equal(chosen[:-1], row[:-1, index].sort(-1).values)
        assert gradients[layer].abs().max() > 0


def replayed_by_core(case, experts):
    """Losses and router gradients with the names that other trainers use."""
    RouterReplay.clear_global_router_replay_instances()
    bridge = harness.AutoBridge.from_hf_pretrained(case.checkpoint)
    provider = bridge.to_megatron_provider()
    provider.moe_enable_routing_replay = True
    (chunk,) = provider.provide_distributed_model(wrap_with_ddp=False)
    chunk.config.moe_aux_loss_coeff = 0.0
    ids, labels = case.batch
    losses = []
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    for row in range(len(ids)):
        RouterReplay.set_replay_data([*experts[row].unbind(1)])
        output = chunk(
            ids[row][None], torch.arange(ids.size(1))[None], None, labels=labels[row][None]
        )
        losses.append(output.mean().item())
        (output.mean() / len(ids)).backward()
    RouterReplay.clear_global_indices()
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    with torch.no_grad():
        chunk(ids[:1], torch.arange(ids.size(1))[None], None)
    recorded = RouterReplay.get_recorded_data()
    RouterReplay.clear_global_router_replay_instances()
    gradients = {
        module.layer_number: module.weight.grad
        for name, module in chunk.named_modules()
        if name.endswith("router")
    }
    return losses, gradients, recorded


def test_losses_and_gradients_are_those_of_core(family_case):
    case = family_case("qwen3_moe")
    experts = routing.random_experts(case)
    experts[:, -1] = torch.tensor([0, 2, 4])
    losses, gradients, _ = routing.train_with_experts(case, "one", experts)
    core_losses, core_gradients, recorded = replayed_by_core(case, experts)
    assert losses == core_losses
    for layer, gradient in gradients.items():
        torch.testing.assert_close(gradient, core_gradients[layer], rtol=1e-6, atol=1e-9)
    expected = routing.hf_experts(case, case.batch[0][0].tolist())
    for index, chosen in enumerate(recorded):
        assert torch.equal(chosen.sort(-1).values, torch.from_numpy(expected[:, index]))


@pytest.mark.parametrize("name", ["ernie45_moe", "deepseek_v2", "gpt_oss"])
def test_rules_of_a_family_weigh_replayed_experts(family_case, name):
    """Replaying what the router chooses changes no bit."""
    case = family_case(name)
    _, (chunk,) = harness.build(case, "one")
    ids = case.batch[0][:1]
    positions = torch.arange(ids.size(1))[None]
    expected = chunk(ids, positions, None)
    with ExpertReplay([chunk]) as replay:
        chosen = []
        for choice in replay._choices:
            choice.record = chosen.append
        chunk(ids, positions, None)
        for choice in replay._choices:
            choice.record = None
        with replay.microbatch(torch.stack(chosen, 1)):
            assert torch.equal(chunk(ids, positions, None), expected)


def test_experts_that_do_not_fit_are_refused(family_case):
    _, (chunk,) = harness.build(family_case("qwen3_moe"), "one")
    with ExpertReplay([chunk]) as replay:
        with (
            pytest.raises(UserError, match=r"are \[4, 2, 3\], but must be \[rows, 3, topk\]"),
            replay.microbatch(torch.zeros(4, 2, 3)),
        ):
            pass
        ids = torch.zeros(1, 5, dtype=torch.long)
        with (
            pytest.raises(UserError, match=r"are \[4, 3\], but its router chooses \[5, 3\]"),
            replay.microbatch(torch.zeros(4, 3, 3)),
        ):
            chunk(ids, torch.arange(5)[None], None)
    _, (chunk,) = harness.build(family_case("phimoe"), "one")
    with pytest.raises(UserError, match="moe_router_sparsemixer_eps"):
        ExpertReplay([chunk])
