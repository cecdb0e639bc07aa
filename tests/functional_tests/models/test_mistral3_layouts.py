# SPDX-License-Identifier: Apache-2.0
"""The text model of a multimodal checkpoint under parallel layouts: the vision tower is written unchanged."""

import pytest
import torch

from tests.functional_tests.models.test_llama_layouts import (
    TOLERANCE,
    TWO,
    assert_same_files,
    convert_and_compare,
)
from tests.toy_models import tokens
from tests.unit_tests.models.test_mistral3 import make


@pytest.mark.parametrize("layout", ["tp2", "vp2"])
def test_two_processes(two_workers, tmp_path, layout):
    hf = make(tmp_path / "hf", tied=layout == "vp2")
    with torch.no_grad():
        expected = hf(input_ids=tokens()[0]).logits
    results = two_workers.run(
        convert_and_compare, tmp_path / "hf", tmp_path / "out", TWO[layout], expected
    )
    assert max(worst for worst, _ in results) <= TOLERANCE
    assert_same_files(tmp_path / "hf", tmp_path / "out")
