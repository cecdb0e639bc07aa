# SPDX-License-Identifier: Apache-2.0
"""Logits of trained tokens alone, under layouts that cut tokens, vocabulary or layers."""

import pytest

from megatron.bridge.training.step import trained_tokens
from tests.toy_run import run_toy, sparse_forward_step
from tests.workers import leave

LAYOUTS = {
    "TP2": {"tensor_model_parallel_size": 2},
    "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "CP2": {"context_parallel_size": 2},
    "PP2": {"pipeline_model_parallel_size": 2},
}


def train(layout):
    """The record of the run, and how often this rank computed logits of some tokens only."""
    calls, losses = [], trained_tokens._losses
    trained_tokens._losses = lambda **given: calls.append(1) or losses(**given)
    try:
        return run_toy({"model": layout}, sparse_forward_step), len(calls)
    finally:
        trained_tokens._losses = losses


@pytest.fixture(scope="module")
def single():
    record, calls = train({})
    leave()
    assert calls
    return record


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_equal_one_process(two_workers, single, layout):
    (first, _), (last, calls) = two_workers.run(train, LAYOUTS[layout])
    assert calls, "the last rank has an output layer"
    assert first.numbers == last.numbers
    assert first.losses == pytest.approx(single.losses, rel=1e-5)
    assert first.held_out == pytest.approx(single.held_out, rel=1e-5)
    assert first.grad_norms == pytest.approx(single.grad_norms, rel=1e-4)
