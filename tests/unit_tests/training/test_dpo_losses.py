# SPDX-License-Identifier: Apache-2.0
"""The losses of pairs are those of TRL's own code, on one batch of token log-probabilities."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from megatron.bridge.training.config import DPOConfig
from megatron.bridge.training.dpo import pair_losses

BETA = 0.4
LENGTHS = [(9, 3), (4, 5), (2, 7)]  # tokens of the chosen and the rejected answers
EXPECTED = {"sigmoid": 0.6947407, "ipo": 1.7751966, "hinge": 0.8285494}
"""The mean loss that ``DPOTrainer._compute_loss`` of TRL 1.16.0 gives; the second test computes it again."""


def log_probs():
    """Of each token [answers, longest], the chosen ones first, by the policy and the reference; and the mask."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(LENGTHS).T.flatten()
    mask = (torch.arange(9) < lengths[:, None]).long()
    both = (-torch.rand(6, 9, generator=generator) * 2 * mask for _ in range(2))
    return *both, mask


def by_answer(tokens, mask, mean):
    sums = tokens.sum(1) / (mask.sum(1) if mean else 1)
    return sums.chunk(2)


def our_losses(loss_type):
    policy, reference, mask = log_probs()
    mean = loss_type == "ipo"
    settings = DPOConfig(beta=BETA, loss_type=loss_type)
    return pair_losses(by_answer(policy, mask, mean), by_answer(reference, mask, mean), settings)


@pytest.mark.parametrize("loss_type", EXPECTED)
def test_losses_are_those_that_trl_computed(loss_type):
    assert our_losses(loss_type)[0].mean().item() == pytest.approx(EXPECTED[loss_type], abs=1e-6)


@pytest.mark.parametrize("loss_type", EXPECTED)
def test_trl_computes_them(loss_type):
    trl = pytest.importorskip(
        "trl", reason="computes the numbers above; install trl==1.16.0 by hand"
    )
    found = float(trl_loss(trl, loss_type))
    assert found == pytest.approx(EXPECTED[loss_type], abs=1e-6)
    assert our_losses(loss_type)[0].mean().item() == pytest.approx(found, abs=1e-6)


def trl_loss(trl, loss_type):
    """TRL's method on models that answer with the log-probabilities of ``log_probs``."""
    policy, reference, mask = log_probs()
    prompt = torch.zeros(6, 1, dtype=torch.long)
    inputs = {
        "input_ids": torch.zeros(6, 10, dtype=torch.long),
        "completion_mask": torch.cat((prompt, mask), 1),
    }

    def answering(tokens):
        logged = {"entropy": tokens, "mean_logits": tokens, "is_top1": tokens > 0}
        return lambda **_: SimpleNamespace(log_probs=tokens, **logged)

    model = torch.nn.Module().eval()
    model.is_gradient_checkpointing = False
    accelerator = SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x)
    trainer = SimpleNamespace(
        model=model,
        ref_model=answering(reference),
        accelerator=accelerator,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        beta=BETA,
        label_smoothing=0.0,
        loss_types=[loss_type],
        loss_weights=[1.0],
        use_weighting=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
    )
    return trl.DPOTrainer._compute_loss(trainer, answering(policy), inputs, False)
