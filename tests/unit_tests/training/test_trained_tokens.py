# SPDX-License-Identifier: Apache-2.0
"""Logits of trained tokens alone train as those of all tokens do."""

import pytest
import torch

from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.config import CheckpointConfig
from megatron.bridge.training.step import trained_tokens
from tests.toy_run import run_toy, save_llama, sparse_forward_step, whole_weights

RUNS = {
    "plain": {},
    "tied": {"model": {"share_embeddings_and_output_weights": True}},
    "further tokens": {"model": {"mtp_num_layers": 1}},
    "adapted": {
        "model": {"num_layers": 2},
        "peft": LoRA(target_modules=["linear_fc2", "output_layer"], dim=4),
    },
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", RUNS)
def test_losses_and_gradients_are_equal(monkeypatch, tmp_path, name):
    run = dict(RUNS[name])
    if "peft" in run:
        run["checkpoint"] = CheckpointConfig(pretrained_checkpoint=str(save_llama(tmp_path)))
    calls, losses = [], trained_tokens._losses
    monkeypatch.setattr(
        trained_tokens, "_losses", lambda **given: calls.append(given) or losses(**given)
    )
    found = run_toy(run, sparse_forward_step)
    assert 2 in {len(given["context"]) for given in calls}, "one microbatch trains no token"
    assert all(len(given["context"]) < given["labels"].numel() / 2 for given in calls)
    calls.clear()
    monkeypatch.setattr(trained_tokens, "WORTHWHILE", -1)
    expected = run_toy(run, sparse_forward_step)
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
