# SPDX-License-Identifier: Apache-2.0
"""A step costs as many operations under every layout, whoever does them."""

import pytest

from megatron.bridge.models.flops import flops_per_token
from tests.families import harness

ROWS = (
    "nemotron_h_experts",
    "granitemoehybrid",
    "qwen3_next",
    "deepseek_v3",
    "llama_tied",
    "gemma4",
    "gemma4_experts",
)


def count(case, layout):
    return flops_per_token(harness.build(case, layout)[1], 40)


@pytest.mark.parametrize("name", ROWS)
def test_layouts(two_workers, family_case, name):
    case = family_case(name)
    expected = count(case, "one")
    assert expected > 0
    for layout in case.row.layouts:
        assert two_workers.run(count, case, layout) == pytest.approx([expected] * 2, rel=1e-9), (
            layout
        )
