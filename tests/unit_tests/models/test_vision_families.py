# SPDX-License-Identifier: Apache-2.0
"""Every vision-language family in one process: logits, gradients and bytes against transformers' own model."""

import pytest

from tests.families.vision import harness
from tests.families.vision.rows import ROWS


@pytest.mark.sampled
@pytest.mark.parametrize("name", ROWS)
def test_numbers_and_bytes(vision_case, tmp_path, name):
    problems = harness.numbers_and_bytes(vision_case(name), "one", tmp_path / "out")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "name",
    [
        "qwen2_5_vl",
        "qwen3_vl",
        "qwen3_5_vl",
        "gemma3_vl",
        "gemma4_vl_experts",
        "paligemma2",
        "mistral3",
        "ministral3_vl",
        "nemotron_nano_vl",
    ],
)
def test_packed_samples(vision_case, name):
    assert harness.packed_error(vision_case(name), "one") <= 1e-4
