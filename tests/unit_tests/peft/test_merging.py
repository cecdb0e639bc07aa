# SPDX-License-Identifier: Apache-2.0
"""How much of an adapter's effect a merge loses by rounding."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from megatron.bridge import AutoBridge
from megatron.bridge.cli.main import main
from megatron.bridge.peft import hf_adapter, layers
from megatron.bridge.peft.lora import rounding_loss
from tests.workers import leave

SAVED = Path("tests/fixtures/v0.1").resolve()


@pytest.fixture
def adapted():
    def build(dtype):
        bridge = AutoBridge.from_hf_pretrained(SAVED / "base", dtype=dtype)
        method = hf_adapter.peft_for(bridge, SAVED / "adapter")
        model = bridge.to_megatron_model(wrap_with_ddp=False)
        method(model, training=False)
        bridge.load_hf_adapter(model, SAVED / "adapter")
        return model

    yield build
    leave()


@pytest.mark.parametrize(
    ("dtype", "scale", "least", "most"),
    [("float32", 1.0, 0.0, 0.0), ("bfloat16", 1e4, 0.0, 0.01), ("bfloat16", 1e-4, 0.9, 1.1)],
)
def test_a_small_adapter_is_lost_in_bf16_and_not_in_fp32(adapted, dtype, scale, least, most):
    model = adapted(dtype)
    for module in layers.adapted(model[0]):
        for part in module.low_rank_parts(module.adapted_site.weights[0]):
            part.b.data.mul_(scale)
    assert least <= rounding_loss(model) <= most


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_a_merge_in_fp32_keeps_what_bf16_would_round(tmp_path, capsys, dtype):
    """The reference is peft's own merge of the bf16 base in fp32."""
    base, options = tmp_path / "base", [] if dtype is None else ["--dtype", dtype]
    AutoModelForCausalLM.from_pretrained(SAVED / "base", dtype=torch.bfloat16).save_pretrained(base)
    given = [
        "--adapter",
        str(SAVED / "adapter"),
        "--hf-model",
        str(base),
        "--hf-path",
        str(tmp_path / "merged"),
    ]
    assert main(["adapter", "merge", *given, *options]) == 0
    assert ("% of the" in capsys.readouterr().err) == (dtype != "float32")
    wide = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = PeftModel.from_pretrained(wide, SAVED / "adapter").merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert merged.dtype == (torch.float32 if dtype == "float32" else torch.bfloat16)
    for name, weight in merged.state_dict().items():
        torch.testing.assert_close(weight, expected[name].to(weight.dtype), rtol=1e-6, atol=1e-7)
    leave()
