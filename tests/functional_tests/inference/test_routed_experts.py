# SPDX-License-Identifier: Apache-2.0
"""The experts of completions under layouts of two processes."""

import pytest
import torch

from tests.families import routing


@pytest.mark.parametrize("layout", ["tp2", "sp2", "pp2", "vp2", "ep2"])
def test_experts_are_those_of_transformers(two_workers, family_case, layout):
    assert two_workers.run(routing.difference, family_case("qwen3_moe"), layout) == ["", ""]


@pytest.mark.parametrize("layout", ["sp2", "pp2", "vp2", "ep2"])
def test_replayed_experts_give_the_losses_of_one_process(two_workers, family_case, layout):
    """Sequence parallelism cuts the rows, and each pipeline stage has its own layers."""
    case = family_case("qwen3_moe")
    experts = routing.random_experts(case)
    losses, gradients, maps = routing.train_with_experts(case, "one", experts)
    results = two_workers.run(routing.train_with_experts, case, layout, experts)
    found_losses = results[-1][0]
    assert found_losses == pytest.approx(losses, rel=1e-5)
    found_gradients = {
        layer: gradient for result in results for layer, gradient in result[1].items()
    }
    for layer, gradient in gradients.items():
        torch.testing.assert_close(found_gradients[layer], gradient, rtol=1e-4, atol=1e-6)
    for layer, calls in maps.items():
        ranks = [result[2][layer] for result in results if layer in result[2]]
        for row, expected in enumerate(calls):
            parts = [rank[row] for rank in ranks]
            chosen = torch.cat(parts) if layout == "sp2" else parts[0]
            assert torch.equal(chosen, expected)
