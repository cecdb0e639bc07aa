# SPDX-License-Identifier: Apache-2.0
"""How much of an adapter's effect a merge loses by rounding."""

from pathlib import Path

import pytest

from megatron.bridge import AutoBridge
from megatron.bridge.peft import hf_adapter, layers
from megatron.bridge.peft.merging import rounding_loss
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
