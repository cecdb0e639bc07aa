# SPDX-License-Identifier: Apache-2.0
"""Rows for several adapters of one toy model, and adapters trained from them."""

import torch

from megatron.bridge import AutoBridge
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.adapter_trainer import AdamSettings, AdapterTrainer
from megatron.bridge.training.step.row_losses import TrainingRow
from tests.toy_adapters import DECODER

METHODS = {
    "small": LoRA(target_modules=["q_proj", "v_proj"], dim=4, alpha=8, seed=1),
    "large": LoRA(target_modules=["linear_qkv", "linear_proj"], dim=8, alpha=8, seed=2),
    "last": LoRA(target_modules=["*.layers.1.*linear_proj"], dim=2, alpha=4, seed=3),
}
# a large epsilon keeps Adam from magnifying the rounding of gradients that are nearly zero
SETTINGS = {
    "small": AdamSettings(learning_rate=1e-2, eps=1e-2, weight_decay=0.1),
    "large": AdamSettings(learning_rate=3e-3, eps=1e-2, grad_clip_norm=0.5),
    "last": AdamSettings(learning_rate=1e-2, eps=1e-2, beta1=0.8),
}
STEPS = 3


def make_rows():
    """Rows of different lengths and losses, with those of different adapters mixed."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index, name in enumerate(["small", "large", "small", "last", "large"]):
        length = 6 + index
        ids = torch.randint(DECODER["vocab_size"], (length + 1,), generator=generator).tolist()
        numbers = torch.randn(length, generator=generator).tolist()
        options = {"weights": [abs(number) for number in numbers]}
        if name == "large":
            loss = "ppo" if index == 1 else "importance_sampling"
            sampled = [-4.5 + 0.1 * number for number in numbers]
            options = {"loss": loss, "advantages": numbers, "sampled_logprobs": sampled}
        rows.append(TrainingRow(name, ids[:-1], ids[1:], **options))
    return rows


def make_trainer(directory, layout=None, **options):
    bridge = AutoBridge.from_hf_pretrained(directory)
    provider = bridge.to_megatron_provider()
    if provider.num_moe_experts:
        provider.moe_aux_loss_coeff = 0.0
    for name, value in (layout or {}).items():
        setattr(provider, name, value)
    chunks = provider.provide_distributed_model(wrap_with_ddp=False)
    return AdapterTrainer(bridge, chunks, **options)


def train(trainer, names, steps=STEPS):
    """Train the adapters ``names`` together; the losses of their rows by step."""
    rows = [row for row in make_rows() if row.adapter in names]
    losses = []
    for _ in range(steps):
        losses.append([result.loss for result in trainer.forward_backward(rows)])
        for name in names:
            trainer.step(name, SETTINGS[name])
    return losses


def weights(trainer, name):
    """The factors of an adapter on this rank, as one vector."""
    parameters = trainer._adapters.parameters(name)
    return torch.cat([torch.zeros(0), *(parameter.detach().flatten() for parameter in parameters)])
