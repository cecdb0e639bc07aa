# SPDX-License-Identifier: Apache-2.0
"""Every vision-language family under every layout it allows: transformers' logits and gradients, and the bytes."""

import pytest

from tests.families.vision import harness
from tests.families.vision.rows import ROWS

TWO = [
    pytest.param(
        row.name, layout, marks=() if row.name == "qwen2_5_vl" or place == 0 else pytest.mark.slow
    )
    for row in ROWS.values()
    for place, layout in enumerate(row.layouts)
]
FOUR = [(row.name, layout) for row in ROWS.values() for layout in row.four]


def check(pool, case, layout, output):
    found = pool.run(harness.numbers_and_bytes, case, layout, output)
    assert not any(found), "\n".join(
        dict.fromkeys(problem for problems in found for problem in problems)
    )


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "layout"), TWO)
def test_two_processes(two_workers, vision_case, tmp_path, name, layout):
    check(two_workers, vision_case(name), layout, tmp_path / "out")


@pytest.mark.parametrize(("name", "layout"), FOUR)
def test_four_processes(four_workers, vision_case, tmp_path, name, layout):
    check(four_workers, vision_case(name), layout, tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["qwen2_5_vl", "qwen3_vl", "qwen3_5_vl", "gemma3_vl", "gemma4_vl_experts", "paligemma2"]
)
def test_packed_samples_under_context_parallelism(two_workers, vision_case, name):
    assert max(two_workers.run(harness.packed_error, vision_case(name), "cp2")) <= 1e-4
