# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning a Hugging Face model gives the numbers of a plain PyTorch loop over transformers' own class."""

import math

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.trainer_pt_utils import LabelSmoother

from megatron.bridge import AutoBridge
from megatron.bridge.data.loaders import build_iterators
from megatron.bridge.data.tokenizer import build_tokenizer
from megatron.bridge.training.callbacks import CallbackManager
from megatron.bridge.training.config import CheckpointConfig, OptimizerConfig, SchedulerConfig
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.utils.errors import UserError
from tests.toy_run import toy_config

LEARNING_RATE, WEIGHT_DECAY, CLIP, WARMUP, STEPS = 3e-3, 0.1, 0.5, 2, 8


def finetuned(directory, **train):
    """Losses and norms of our run."""
    provider = AutoBridge.from_hf_pretrained(str(directory)).to_megatron_provider(
        load_weights=False
    )
    provider.calculate_per_token_loss = True
    config = toy_config(
        train={"train_iters": STEPS, **train},
        optimizer=OptimizerConfig(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, clip_grad=CLIP),
        scheduler=SchedulerConfig(
            lr_warmup_iters=WARMUP, lr_warmup_init=0.0, lr_decay_style="cosine"
        ),
        checkpoint=CheckpointConfig(pretrained_checkpoint=str(directory)),
    )
    config.model = provider
    seen, manager = [], CallbackManager()
    manager.register(
        "on_train_step_end",
        lambda context: seen.append(
            (context.loss_dict["lm loss"].item(), float(context.grad_norm))
        ),
    )
    finetune(config, forward_step, manager)
    return config, seen


def plain_loop(directory, config, loss_of=None):
    """The same with transformers' model, torch's AdamW and nothing of Megatron's."""
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": WEIGHT_DECAY},
            {"params": others, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.999),
        eps=1e-8,
    )
    size = config.train.global_batch_size
    batches = build_iterators(
        config.dataset, build_tokenizer(config.tokenizer), (STEPS * size, 0, 0), size, size
    )
    for step in range(STEPS):
        batch = next(batches.train)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        output = model(input_ids=batch["tokens"])
        loss = (loss_of or mean_cross_entropy)(output, batch)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        yield loss.item(), norm.item()


def mean_cross_entropy(output, batch):
    losses = torch.nn.functional.cross_entropy(
        output.logits.flatten(0, 1), batch["labels"].flatten(), reduction="none"
    )
    mask = batch["loss_mask"].flatten()
    return (losses * mask).sum() / mask.sum()


def smoothed_by_transformers(output, batch):
    labels = batch["labels"].masked_fill(batch["loss_mask"] == 0, -100)
    return LabelSmoother(epsilon=0.1)(output, labels)


def learning_rate(step):
    if step <= WARMUP:
        return LEARNING_RATE * step / WARMUP
    return LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


@pytest.mark.parametrize(
    ("train", "loss_of"),
    [({}, mean_cross_entropy), ({"label_smoothing": 0.1}, smoothed_by_transformers)],
)
def test_finetuning_equals_a_plain_loop(hf_directory, train, loss_of):
    torch.set_num_threads(1)
    config, seen = finetuned(hf_directory, **train)
    expected = list(plain_loop(hf_directory, config, loss_of))
    assert len(seen) == STEPS
    losses, norms = zip(*seen, strict=True)
    expected_losses, expected_norms = zip(*expected, strict=True)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert norms == pytest.approx(expected_norms, rel=2e-5)
    assert losses[-1] < losses[0]


def test_finetuning_without_weights_is_refused():
    with pytest.raises(UserError, match=r"checkpoint.pretrained_checkpoint is not set"):
        finetune(toy_config(), forward_step)
