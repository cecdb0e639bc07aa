# SPDX-License-Identifier: Apache-2.0
"""The losses and advantages of GRPO are those of TRL's own code, on one batch of token log-probabilities.

``grpo_losses_of_trl.json`` has what TRL 1.16.0 computes for each case: the loss, and the norm of its gradient.
``python -m tests.unit_tests.training.test_grpo_losses`` writes it again where TRL is installed.
"""

import itertools
import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.bridge.training.config import GRPOConfig
from megatron.bridge.training.reinforcement.advantages import score_rewards
from megatron.bridge.training.reinforcement.losses import (
    CompletionTokens,
    correction_ratios,
    kl_estimates,
    policy_losses,
    token_weights,
)

FILE = Path(__file__).with_name("grpo_losses_of_trl.json")
LENGTHS = [9, 3, 0, 5, 2, 7]  # tokens in the loss of each completion; 0 is a truncated one
LONGEST = 9
VARIANTS = {
    "plain": {},
    "asymmetric": {"epsilon": 0.1, "epsilon_high": 0.3},
    "two-sided": {"epsilon_high": 0.28, "delta": 1.5},
    "kl": {"beta": 0.3},
    "biased kl": {"beta": 0.3, "use_bias_correction_kl": False},
    "token_truncate": {"importance_sampling_mode": "token_truncate"},
    "token_mask": {
        "importance_sampling_mode": "token_mask",
        "importance_sampling_clip_max": 1.2,
        "importance_sampling_clip_min": 0.5,
    },
    "sequence_truncate": {"importance_sampling_mode": "sequence_truncate", "beta": 0.2},
    "sequence_mask": {"importance_sampling_mode": "sequence_mask", "delta": 2.0},
    "on-policy": {"on_policy": True, "beta": 0.1},
}
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
CASES = {
    f"{loss_type} {level} {name}": {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        **({"epsilon_high": 2.0} if loss_type == "cispo" else {}),
        **variant,
    }
    for loss_type, level, (name, variant) in itertools.product(
        LOSS_TYPES, ("token", "sequence"), VARIANTS.items()
    )
}


def settings_of(case):
    options = {name: value for name, value in case.items() if name != "on_policy"}
    corrects = "importance_sampling_mode" in case
    return GRPOConfig(
        max_completion_length=LONGEST, importance_sampling_correction=corrects, **options
    )


def batch():
    """Log-probabilities [completions, longest] by model, old model, reference and engine; mask, advantages."""
    generator = torch.Generator().manual_seed(0)
    base = -2 * torch.rand(len(LENGTHS), LONGEST, generator=generator)
    spread = (0.3 * torch.randn(4, *base.shape, generator=generator)).unbind()
    mask = (torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]).float()
    advantages = torch.randn(len(LENGTHS), generator=generator)
    names = ("model", "old", "reference", "engine")
    return {name: base + part for name, part in zip(names, spread, strict=True)}, mask, advantages


def our_loss(case):
    """The loss, and its gradient for each log-probability."""
    settings = settings_of(case)
    log_probs, mask, advantages = batch()
    model = log_probs["model"].clone().requires_grad_()
    corrections = None
    if settings.importance_sampling_correction:
        corrections = torch.ones_like(mask)
        for row, length in enumerate(LENGTHS):
            parts = (log_probs[name][row, :length] for name in ("old", "engine"))
            corrections[row, :length] = correction_ratios(*parts, settings)
    counts = mask.sum(1, keepdim=True)
    flat = lambda values: values.expand_as(mask).flatten()  # noqa: E731
    tokens = CompletionTokens(
        mask=mask.flatten(),
        lengths=flat(counts.clamp(min=1)),
        advantages=flat(advantages[:, None]),
        sum_of_sequence=lambda values: flat(values.view_as(mask).sum(1, keepdim=True)),
        old_log_probs=None if case.get("on_policy") else log_probs["old"].flatten(),
        reference_log_probs=log_probs["reference"].flatten() if settings.beta else None,
        corrections=None if corrections is None else corrections.flatten(),
    )
    weights = torch.tensor(token_weights(LENGTHS, len(LENGTHS), sum(LENGTHS), settings))
    losses = policy_losses(model.flatten(), tokens, settings).losses.view_as(mask)
    loss = (losses * mask * weights[:, None]).sum() / len(LENGTHS)
    loss.backward()
    return loss.item(), model.grad


def stored():
    return json.loads(FILE.read_text())


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_that_trl_computed(name):
    loss, gradient = our_loss(CASES[name])
    expected_loss, expected_norm = stored()[name]
    assert loss == pytest.approx(expected_loss, abs=1e-6)
    assert gradient.norm().item() == pytest.approx(expected_norm, rel=1e-5, abs=1e-6)


def test_every_case_is_stored():
    assert set(stored()) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_trl_computes_them(name):
    trl = pytest.importorskip("trl", reason="computes the file; install trl==1.16.0 by hand")
    loss, gradient = loss_of_trl(trl, CASES[name])
    expected_loss, expected_norm = stored()[name]
    assert loss == pytest.approx(expected_loss, abs=1e-6)
    assert gradient.norm().item() == pytest.approx(expected_norm, abs=1e-6)
    our_value, our_gradient = our_loss(CASES[name])
    assert our_value == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(our_gradient, gradient, rtol=1e-5, atol=1e-6)


def loss_of_trl(trl, case):
    """TRL's method on log-probabilities of ``batch``, and its gradient for each of the model's."""
    settings = settings_of(case)
    log_probs, mask, advantages = batch()
    model_log_probs = log_probs["model"].clone().requires_grad_()
    prompt = torch.zeros(len(LENGTHS), 1, dtype=torch.long)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt + 1,
        "completion_ids": torch.zeros_like(mask, dtype=torch.long),
        "completion_mask": mask,
        "advantages": advantages,
        "ref_per_token_logps": log_probs["reference"],
        "num_items_in_batch": mask.sum(),
    }
    if not case.get("on_policy"):
        inputs["old_per_token_logps"] = log_probs["old"]
    if settings.importance_sampling_correction:
        inputs["importance_sampling_ratio"] = ratios_of_trl(settings, log_probs, mask)
    reduced = SimpleNamespace(
        num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x, sync_gradients=True
    )
    names = ("sapo_temperature_neg", "sapo_temperature_pos", "delta", "use_bias_correction_kl")
    names += ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (model_log_probs, mask, None),
        args=SimpleNamespace(
            steps_per_generation=1, **{name: getattr(settings, name) for name in names}
        ),
        model=torch.nn.Module().train(),
        accelerator=reduced,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=settings.importance_sampling_level,
        beta=settings.beta,
        loss_type=settings.loss_type,
        epsilon_low=settings.epsilon,
        epsilon_high=settings.highest_ratio,
        use_vllm=settings.importance_sampling_correction,
        vllm_importance_sampling_correction=True,
        max_completion_length=settings.max_completion_length,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        get_gamma_weights=trl.GRPOTrainer.get_gamma_weights,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    loss = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.item(), model_log_probs.grad


def ratios_of_trl(settings, log_probs, mask):
    """The lines of ``_generate_and_score_completions`` that make them, in their order."""
    difference = (log_probs["old"] - log_probs["engine"]) * mask
    granularity, limit = settings.importance_sampling_mode.split("_")
    if granularity == "sequence":
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    low, high = settings.importance_sampling_clip_min, settings.importance_sampling_clip_max
    if limit == "truncate":
        return ratio.clamp(min=low, max=high)
    low = float("-inf") if low is None else low
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


REWARDS = [[1.0, 0.5], [0.0, 0.5], [2.0, None], [None, None]] + [[1.0, 0.0]] * 4


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("estimator", ["group", "rloo"])
def test_advantages_are_those_of_a_plain_loop(scale, estimator):
    """One completion that nobody scored; the rewards of the second group are equal."""
    settings = GRPOConfig(
        num_generations=4,
        reward_weights=[1.0, 2.0],
        scale_rewards=scale,
        advantage_estimator=estimator,
    )
    table = torch.tensor([[float("nan") if x is None else x for x in row] for row in REWARDS])
    scores = score_rewards(table, settings)
    rewards = [2.0, 1.0, 2.0, None, 1.0, 1.0, 1.0, 1.0]
    known = [reward for reward in rewards if reward is not None]
    expected = []
    for place, reward in enumerate(rewards):
        first = place // 4 * 4
        group = [other for other in rewards[first : first + 4] if other is not None]
        if reward is None:
            expected.append(0.0)
        elif estimator == "rloo":
            others = (sum(group) - reward) / (len(group) - 1)
            expected.append(reward - others)
        else:
            spread = {"group": deviation(group), "batch": deviation(known), "none": 1 - 1e-4}
            expected.append((reward - sum(group) / len(group)) / (spread[scale] + 1e-4))
    assert scores.advantages.tolist() == pytest.approx(expected, abs=1e-6)
    assert scores.has_signal.tolist() == [True, False]


def deviation(values):
    mean = sum(values) / len(values)
    return (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5


def test_kl_estimates_are_unbiased_or_biased_as_published():
    """Over all tokens of a distribution, k1 and k3 have the exact divergence as their mean."""
    generator = torch.Generator().manual_seed(0)
    model, reference = (torch.randn(2, 50, generator=generator) / 3).log_softmax(-1)
    exact = (model.exp() * (model - reference)).sum()
    means = {
        name: (model.exp() * kl_estimates(model, reference, name)).sum().item()
        for name in ("k1", "k2", "k3")
    }
    assert means["k1"] == pytest.approx(exact.item(), abs=1e-6)
    assert means["k3"] == pytest.approx(exact.item(), abs=1e-6)
    assert means["k2"] == pytest.approx(exact.item(), rel=0.2)


if __name__ == "__main__":
    import trl as installed

    values = {name: loss_of_trl(installed, case) for name, case in CASES.items()}
    lines = {name: [loss, gradient.norm().item()] for name, (loss, gradient) in values.items()}
    FILE.write_text(json.dumps(lines, indent=1) + "\n")
