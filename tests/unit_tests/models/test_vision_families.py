# SPDX-License-Identifier: Apache-2.0
"""Every vision-language family in one process: logits, gradients and bytes against transformers' own model."""

import pytest

from tests.families.vision import harness
from tests.families.vision.rows import ROWS


@pytest.mark.parametrize("name", ROWS)
def test_numbers_and_bytes(vision_case, tmp_path, name):
    problems = harness.numbers_and_bytes(vision_case(name), "one", tmp_path / "out")
    assert not problems, "\n".join(problems)
