# SPDX-License-Identifier: Apache-2.0
"""Activations of each rank as they are counted, against the live storages of steps of several processes."""

import gc
import itertools
import statistics

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules

from megatron.bridge.autotune import activations, meta_model
from megatron.bridge.autotune.vision_tower import LiveBytes
from megatron.bridge.backends.kernels import eager
from megatron.bridge.training.gpt_step import forward_step
from tests.functional_tests.autotune.test_memory import CP, EP, ETP, PP, SP, TP, VP
from tests.unit_tests.autotune.models import SEQUENCE, provider
from tests.unit_tests.autotune.test_memory import configured
from tests.unit_tests.autotune.test_peak import FULL, within_bars
from tests.workers import forget_model_parallel


def config_of(family, layout):
    model = provider(family, layers=4, bf16=True, **layout)
    model.bias_activation_fusion = model.resolved().bias_activation_fusion  # as this machine can
    return configured(model)


def batches():
    """The same tokens in all microbatches and ranks: experts' tokens, and so the peak, would vary otherwise."""
    tokens = torch.randint(0, 500, (1, SEQUENCE), generator=torch.Generator().manual_seed(0))
    batch = {
        "tokens": tokens,
        "labels": tokens,
        "loss_mask": torch.ones(1, SEQUENCE),
        "attention_mask": None,
    }
    return itertools.repeat({**batch, "position_ids": torch.arange(SEQUENCE)[None]})


def peak(family, layout):
    """The stage, and the bytes that a step of this rank holds at most, weights and gradients left out."""
    from megatron.bridge.training.setup import build_model, initialize

    eager.CHUNK = 1 << 11  # a block of logits would be all logits of a toy
    config = config_of(family, layout).resolve().config
    initialize(config)
    chunks = build_model(config)
    iterators = [batches() for _ in chunks]
    gc.collect()
    with LiveBytes() as live:
        schedules.get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks,
            num_microbatches=8,
            seq_length=SEQUENCE,
            micro_batch_size=1,
        )
    return parallel_state.get_pipeline_model_parallel_rank(), live.peak


def all_peaks(cases):
    found = []
    for case in cases:
        found.append(peak(*case))
        forget_model_parallel()
    return found


def errors(case, ranks):
    """By stage, how much more is counted than its ranks hold on average, as a fraction: the busiest has more tokens."""
    config = config_of(*case).resolve(len(ranks)).config
    stages = meta_model.stage_chunks(config.model)
    counted = [
        activations.activation_bytes(config, chunks, i, len(ranks))
        for i, chunks in enumerate(stages)
    ]
    held = [
        statistics.mean(size for stage, size in ranks if stage == i) for i in range(len(stages))
    ]
    return [estimate / real - 1 for estimate, real in zip(counted, held, strict=True)]


DENSE = [
    ("llama", layout)
    for layout in ({TP: 2}, SP, {CP: 2}, {**SP, PP: 2}, {**SP, CP: 2}, {PP: 2, VP: 2, TP: 2})
]
RINGS = [
    (family, {**layout, "cp_comm_type": "p2p"})
    for family, layout in (
        ("llama", {CP: 2}),
        ("llama", {CP: 4}),
        ("gemma2", {CP: 2}),
        ("gemma2", {CP: 4}),
        ("gemma2", {**SP, CP: 2}),
    )
]
RECOMPUTED = [("llama", {**layout, **FULL}) for layout in (SP, {CP: 2}, {**SP, PP: 2})]
EXPERTS = [{EP: 2}, {**SP, EP: 2, ETP: 1}, {**SP, EP: 2, ETP: 2}, {EP: 2, PP: 2}]
ROUTED = [("qwen3_moe", layout) for layout in EXPERTS] + [
    ("deepseek_v3", layout) for layout in (*EXPERTS[:2], SP)
]
HYBRID = [(family, layout) for family in ("nemotron_h", "qwen3_next") for layout in (SP, {CP: 2})]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [DENSE, RINGS, RECOMPUTED, ROUTED, HYBRID],
    ids=["dense", "rings", "recomputed", "experts", "hybrid"],
)
def test_activations_are_those_of_each_rank(four_workers, cases):
    found = zip(*four_workers.run(all_peaks, cases), strict=True)
    wrong = {str(case): errors(case, ranks) for case, ranks in zip(cases, found, strict=True)}
    assert all(within_bars(1 + error, 1) for each in wrong.values() for error in each), wrong
