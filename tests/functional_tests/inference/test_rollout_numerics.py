# SPDX-License-Identifier: Apache-2.0
"""The first step of reinforcement learning under layouts: log-probabilities are bitwise those of the rollouts."""

import pytest

from tests.families import rollouts


@pytest.mark.parametrize(
    ("name", "layout", "bf16"),
    [
        ("llama_tied", "tp2", True),
        ("qwen3_moe", "tp2", False),
        ("qwen3_moe", "ep2", True),
        ("qwen3_moe", "pp2", False),
        ("qwen3_moe", "vp2", False),
        ("deepseek_v3", "tp2", True),
    ],
)
def test_logprobs_are_those_of_rollouts(two_workers, family_case, name, layout, bf16):
    differences = two_workers.run(
        rollouts.largest_difference_of_steps, family_case(name), layout, bf16
    )
    assert differences == [0.0, 0.0]
