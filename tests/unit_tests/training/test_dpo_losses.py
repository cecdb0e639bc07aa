# SPDX-License-Identifier: Apache-2.0
"""The losses of pairs are those of TRL's own code, on one batch of token log-probabilities."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from megatron.bridge.training.config import DPOConfig
from megatron.bridge.training.dpo import log_one_minus_exp, pair_losses

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


WITHOUT_REFERENCE = {
    "cpo": DPOConfig(beta=BETA, loss_type="cpo", label_smoothing=0.1),
    "simpo": DPOConfig(beta=2.0, loss_type="simpo", simpo_gamma=0.7),
    "orpo": DPOConfig(beta=BETA, loss_type="orpo"),
}


@pytest.mark.parametrize("name", WITHOUT_REFERENCE)
def test_losses_without_a_reference_are_those_of_trl(name):
    """Of TRL's own functions, where it is installed; else of the published formulas."""
    settings = WITHOUT_REFERENCE[name]
    tokens, _, mask = log_probs()
    chosen, rejected = by_answer(tokens, mask, mean=name != "cpo")
    losses, *rewards = pair_losses((chosen, rejected), None, settings)
    if name == "orpo":
        odds = (chosen.exp() / (1 - chosen.exp())) / (rejected.exp() / (1 - rejected.exp()))
        expected = -settings.beta * torch.sigmoid(odds.log()).log()
    else:
        logits = settings.beta * (chosen - rejected) - (0.7 if name == "simpo" else 0.0)
        share = settings.label_smoothing
        expected = -(1 - share) * torch.sigmoid(logits).log()
        expected -= share * torch.sigmoid(-logits).log()
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rewards[0], settings.beta * chosen)
    experimental = pytest.importorskip(f"trl.experimental.{'orpo' if name == 'orpo' else 'cpo'}")
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"),
        beta=settings.beta,
        alpha=0.0,
        loss_type="simpo" if name == "simpo" else "sigmoid",
        simpo_gamma=settings.simpo_gamma,
        label_smoothing=settings.label_smoothing,
    )
    if name == "orpo":
        of_trl = -experimental.ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0]
    else:
        of_trl = experimental.CPOTrainer.cpo_loss(trainer, chosen, rejected)[0]
    torch.testing.assert_close(losses, of_trl, rtol=1e-6, atol=1e-6)


def test_odds_are_exact_for_all_probabilities():
    """Near 0 and near 1, with finite gradients."""
    values = torch.tensor([-1e-6, -0.5, -0.6931472, -1.0, -40.0], requires_grad=True)
    found = log_one_minus_exp(values)
    expected = (1 - values.detach().double().exp()).log().float()
    torch.testing.assert_close(found.detach(), expected, rtol=1e-5, atol=1e-7)
    found.sum().backward()
    assert torch.isfinite(values.grad).all()


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
