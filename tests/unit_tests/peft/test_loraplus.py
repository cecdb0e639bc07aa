# SPDX-License-Identifier: Apache-2.0
"""LoRA+: the groups of the peft library's optimizer, and the same training."""

import pytest
import torch
from peft import PeftModel
from peft.optimizers import create_loraplus_optimizer

from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.config import OptimizerConfig
from megatron.bridge.training.optim.optimizer import build_optimizer, torch_optimizers
from megatron.bridge.utils.errors import UserError
from tests.toy_adapters import (
    EPSILON,
    LEARNING_RATE,
    adapted,
    make,
    reference_loss,
    shake,
    share_factors,
    step,
)

RATIO = 16.0


def rates_of(optimizer):
    """Learning rate -> number of values that have it."""
    sizes = {}
    for group in optimizer.param_groups:
        rate = group.get("max_lr") or group["lr"]
        sizes[rate] = sizes.get(rate, 0) + sum(one.numel() for one in group["params"])
    return {rate: size for rate, size in sizes.items() if size}


def of_peft(adapter):
    model = PeftModel.from_pretrained(make("llama"), adapter, is_trainable=True)
    settings = {"lr": LEARNING_RATE, "loraplus_lr_ratio": RATIO, "eps": EPSILON}
    return share_factors(model), settings


def test_trains_as_in_peft(models, tmp_path):
    method = LoRA(dim=4, alpha=8, loraplus_lr_ratio=RATIO)
    bridge, model = adapted(models("llama"), method)
    shake(bridge, model, tmp_path / "adapter")
    reference, settings = of_peft(tmp_path / "adapter")
    optimizer = create_loraplus_optimizer(reference, torch.optim.AdamW, **settings)
    config = OptimizerConfig(
        lr=LEARNING_RATE,
        weight_decay=0.0,
        clip_grad=0.0,
        adam_eps=EPSILON,
        use_distributed_optimizer=False,
    )
    ours = build_optimizer(config, model)
    for group in ours.param_groups:
        group["lr"] = group["max_lr"]  # as the schedule does
    expected = []
    for _ in range(4):
        loss = reference_loss(reference)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert [step(model, ours) for _ in range(4)] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("method", [LoRA, DoRA])
def test_groups_have_the_sizes_of_peft(models, tmp_path, method):
    bridge, model = adapted(models("llama"), method(dim=4, alpha=8, loraplus_lr_ratio=RATIO))
    bridge.save_hf_adapter(model, tmp_path / "adapter", show_progress=False)
    reference, settings = of_peft(tmp_path / "adapter")
    optimizer = create_loraplus_optimizer(reference, torch.optim.AdamW, **settings)
    config = OptimizerConfig(lr=LEARNING_RATE, use_distributed_optimizer=False)
    (ours,) = torch_optimizers(build_optimizer(config, model))
    assert rates_of(ours) == pytest.approx(rates_of(optimizer))
    assert set(rates_of(ours)) == {LEARNING_RATE, LEARNING_RATE * RATIO}


def test_a_lower_rate_for_b_is_refused(models):
    with pytest.raises(UserError, match=r"peft\.loraplus_lr_ratio=0\.5"):
        adapted(models("llama"), LoRA(loraplus_lr_ratio=0.5))
