# SPDX-License-Identifier: Apache-2.0
"""Logits of trained tokens alone train as those of all tokens do."""

import pytest
import torch

from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training import gpt_step
from megatron.bridge.training.config import CheckpointConfig
from megatron.bridge.training.step import trained_tokens
from tests.toy_run import run_toy, save_llama, whole_weights


def step(data_iterator, model):
    """The forward step with a loss mask that leaves out most tokens, and those of every fourth microbatch all."""
    batch = dict(next(data_iterator))
    generator = torch.Generator().manual_seed(int(batch["tokens"].sum()))
    empty = int(batch["tokens"][0, 0]) % 4 == 0
    mask = torch.rand(batch["loss_mask"].shape, generator=generator) < 0.3
    batch["loss_mask"] = (mask & (not empty)).float()
    return gpt_step.forward_step(iter([batch]), model)


RUNS = {
    "plain": {},
    "tied": {"model": {"share_embeddings_and_output_weights": True}},
    "further tokens": {"model": {"mtp_num_layers": 1}},
    "adapted": {"model": {"num_layers": 2}, "peft": LoRA(target_modules=["linear_fc2", "output_layer"], dim=4)},
}


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_gradients_are_equal(monkeypatch, tmp_path, name):
    run = dict(RUNS[name])
    if "peft" in run:
        run["checkpoint"] = CheckpointConfig(pretrained_checkpoint=str(save_llama(tmp_path)))
    calls, losses = [], trained_tokens._losses
    monkeypatch.setattr(trained_tokens, "_losses", lambda **given: calls.append(given) or losses(**given))
    found = run_toy(run, step)
    assert {len(given["context"]) for given in calls} >= {1}, "one microbatch trains no token"
    assert all(len(given["context"]) < given["labels"].numel() / 2 for given in calls)
    calls.clear()
    monkeypatch.setattr(trained_tokens, "WORTHWHILE", -1)
    expected = run_toy(run, step)
    assert not calls
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.held_out == pytest.approx(expected.held_out, rel=1e-6)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
    weights = whole_weights([expected])
    for name, weight in whole_weights([found]).items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=1e-5)


def test_where_all_tokens_are_trained_nothing_changes(monkeypatch):
    monkeypatch.setattr(trained_tokens, "_losses", lambda **_: pytest.fail("not worthwhile"))
    assert run_toy({"train": {"train_iters": 1}}).losses
