# SPDX-License-Identifier: Apache-2.0
"""What a GPU holds beside tensors, against the groups in which a rank of a real step sends messages."""

import types

import pytest

from megatron.bridge.autotune.gpus import GPUS
from megatron.bridge.autotune.reserve import Reserve, communicators, reserve_of
from megatron.bridge.cli.rehearse import rank
from tests.toy_run import toy_config
from tests.workers import leave

TP, CP, PP = (f"{kind}_parallel_size" for kind in ("tensor_model", "context", "pipeline_model"))
EP, ETP, VP = (
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "virtual_pipeline_model_parallel_size",
)
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "moe_token_dispatcher_type": "alltoall",
}
BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
SHARDED = {TP: 2, "sequence_parallel": True}
CASES = {
    "alone": (1, {}, 3),
    "copies": (2, {}, 4),
    "all of a dense model": (
        16,
        {**SHARDED, CP: 2, PP: 2, "share_embeddings_and_output_weights": True},
        7,
    ),
    "virtual stages": (2, {PP: 2, VP: 2}, 6),
    "experts alone": (1, EXPERTS, 4),
    "whole experts": (2, {**SHARDED, ETP: 1, **EXPERTS}, 8),
    "all of experts": (32, {**SHARDED, PP: 2, CP: 2, EP: 2, ETP: 2, **EXPERTS}, 11),
    "a bias of experts": (2, {EP: 2, **EXPERTS, **BIAS}, 8),
}


def resolved(world_size, values):
    config = toy_config(
        model={"use_cpu_initialization": False, **values},
        train={"global_batch_size": 64},
        mixed_precision="bf16_mixed",
    )
    return rank.resolved_config(
        types.SimpleNamespace(resolve=config.resolve, source="toy"), world_size
    )


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_communicators_are_those_of_a_real_step(monkeypatch, name):
    """Ranks meet in the group of all of them when they start; a message outside a batch connects two ranks."""
    world_size, values, expected = CASES[name]
    leave()
    config = resolved(world_size, values)
    predicted = communicators(config, world_size)
    messages = rank.rehearse_parts(config, 0, world_size, lambda part: None)
    groups = {(each.group, each.ranks) for each in messages} | (
        {("default_pg", world_size)} if world_size > 1 else set()
    )
    neighbors = 2 if config.model.overlap_p2p_comm else 0
    assert predicted == expected == len(groups) + neighbors


def test_what_fits_is_never_above_the_card():
    config = resolved(16, {**SHARDED, PP: 2})
    reserve = reserve_of(config, 16, "H100 80GB")
    assert reserve.fixed == {
        "CUDA context": 619_000_000,
        "libraries": 74_000_000,
        "NCCL, 5 communicators": 564_000_000 + 4 * 388_000_000,
    }
    for card in GPUS.values():
        room = reserve.inside(card.memory)
        assert 0.85 * card.memory < room < 0.95 * card.memory
        assert card.memory - 2 <= reserve.around(room) <= card.memory


def test_a_card_without_a_measurement_says_whose_it_has():
    config = resolved(1, {})
    lines = {card: "\n".join(reserve_of(config, 1, card).lines(10**10, card)) for card in GPUS}
    told = "not measured on B200 180GB: context, libraries and NCCL are the values for H100 80GB"
    assert told in lines["B200 180GB"]
    assert "not measured" not in lines["H100 80GB"]
    assert lines["H100 80GB"].splitlines()[0] == "    7.6 GB  tensors"
    assert Reserve({}).around(100) == 105, "a CPU has fragments only"
