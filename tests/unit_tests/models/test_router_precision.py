# SPDX-License-Identifier: Apache-2.0
"""A router's correction bias is single precision in a half-precision model, here and in the checkpoint."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.bridge import AutoBridge
from tests.families import harness
from tests.families.rows import ROWS

BIAS = "model.layers.3.mlp.gate.e_score_correction_bias"


@pytest.fixture
def checkpoint(tmp_path):
    hf = harness.hf_model(ROWS["glm4_moe"])
    for parameter in hf.parameters():  # not the buffers, as transformers keeps them
        parameter.data = parameter.data.bfloat16()
    hf.config.dtype = torch.bfloat16
    hf.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_it_stays_as_stored_through_model_and_export(checkpoint, tmp_path):
    stored = load_file(checkpoint / "model.safetensors")
    assert stored[BIAS].dtype is torch.float32
    bridge = AutoBridge.from_hf_pretrained(checkpoint)
    (chunk,) = bridge.to_megatron_model()
    routers = {name: buffer for name, buffer in chunk.named_buffers() if "router" in name}
    assert {buffer.dtype for buffer in routers.values()} == {
        torch.float32
    }  # the counts of tokens too
    assert {parameter.dtype for parameter in chunk.parameters()} == {torch.bfloat16}
    (held,) = (
        buffer
        for name, buffer in routers.items()
        if "layers.3" in name and name.endswith("expert_bias")
    )
    assert torch.equal(held, stored[BIAS])
    bridge.save_hf_pretrained([chunk], tmp_path / "out", show_progress=False)
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (checkpoint / name).read_bytes()


@pytest.mark.parametrize("name", [BIAS, "model.layers.3.mlp.gate.weight"])
def test_the_gate_and_its_bias_may_be_stored_either_way(checkpoint, tmp_path, name, capsys):
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    other = torch.bfloat16 if name == BIAS else torch.float32
    save_file({**tensors, name: tensors[name].to(other)}, path, {"format": "pt"})
    bridge = AutoBridge.from_hf_pretrained(checkpoint)
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
