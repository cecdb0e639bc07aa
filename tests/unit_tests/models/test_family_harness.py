# SPDX-License-Identifier: Apache-2.0
"""The family test fails where it should, and says which tensor and how far."""

import json
import re

import pytest
import torch

from megatron.bridge.checkpoint.model_io import unwrap
from tests.families import harness

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def built(family_case):
    case = family_case("llama_plain")
    bridge, model = harness.build(case, "one", ddp=True)
    return case, bridge, model, unwrap(model[0]).decoder.layers[1].mlp.linear_fc2


def test_one_wrong_number(built, tmp_path):
    case, bridge, model, layer = built
    with torch.no_grad():
        layer.weight[0, 0] += 0.5
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    (problem,) = harness.different_files(case, tmp_path / "out")
    assert re.fullmatch(
        rf"model-\d+-of-\d+.safetensors: {DOWN} differs in 1 of 3456 numbers, by up to 5.0e-01",
        problem,
    )
    (problem,) = harness.different_logits(case.logits, harness.forward_backward(model, *case.batch))
    assert re.fullmatch(
        r"logits differ by .*e-0[1-3] of their deviation \(at most 1e-04\)", problem
    )


def test_one_wrong_gradient(built):
    case, bridge, model, layer = built
    harness.forward_backward(model, *case.batch)
    layer.weight.main_grad[0, 0] *= 1.5
    harness.gradients_for_weights(model)
    found = dict(bridge.export_hf_weights(model, show_progress=False))
    (problem,) = harness.different_gradients(case, found)
    assert problem.startswith(f"gradient of {DOWN} differs by ")
    del found[DOWN]
    assert harness.different_gradients(case, found) == [f"gradient of {DOWN} is missing"]


def test_other_files(built, tmp_path):
    case, bridge, model, _ = built
    out = tmp_path / "out"
    bridge.save_hf_pretrained(model, out, show_progress=False)
    assert harness.different_files(case, out) == []
    (out / "tokenizer.json").unlink()
    (out / "extra.txt").touch()
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1.0}))
    assert harness.different_files(case, out) == [
        "config.json differs in rms_norm_eps: 1e-05 is now 1.0",
        "extra.txt is new",
        "tokenizer.json is missing",
    ]


def test_numbers_that_are_not_finite():
    logits = torch.zeros(1, 2, 3)
    assert harness.different_logits(torch.randn(1, 2, 3), logits / 0)[0].startswith(
        "logits differ by inf"
    )
