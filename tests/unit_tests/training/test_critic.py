# SPDX-License-Identifier: Apache-2.0
"""Advantages, returns and value losses are those of verl's own code.

``ppo_of_verl.json`` has what verl 0.9.1 computes for each case. ``python -m tests.unit_tests.training.test_critic``
writes it again where verl is installed.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from megatron.bridge.training.config import GRPOConfig
from megatron.bridge.training.config.blocks.reinforcement import CriticConfig
from megatron.bridge.training.reinforcement.advantages import standardize
from megatron.bridge.training.reinforcement.critic import set_advantages
from megatron.bridge.training.reinforcement.losses import value_losses
from megatron.bridge.training.reinforcement.rollouts import Rollout

FILE = Path(__file__).with_name("ppo_of_verl.json")
LENGTHS = [9, 3, 5, 1, 7]
LONGEST = 9
RESULTS_OF_TOOLS = {0: range(3, 6), 4: range(1, 3)}  # completion -> tokens that it did not write
CASES = {
    "rewards alone": {"gamma": 1.0, "lam": 1.0},
    "defaults": {"gamma": 1.0, "lam": 0.95},
    "discounted": {"gamma": 0.9, "lam": 0.5},
    "values alone": {"gamma": 0.97, "lam": 0.0},
}
CLIP = 0.2


def batch():
    """Rewards and values [completions, longest], and the mask of what the model wrote."""
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]).float()
    values = torch.randn(mask.shape, generator=generator)
    rewards = torch.zeros_like(mask)
    for row, length in enumerate(LENGTHS):
        rewards[row, length - 1] = torch.randn((), generator=generator)
        mask[row, list(RESULTS_OF_TOOLS.get(row, ()))] = 0
    new_values = values + 0.4 * torch.randn(mask.shape, generator=generator)
    return rewards, values, new_values, mask


def rollouts():
    rewards, values, _, mask = batch()
    return [
        Rollout(
            prompt_tokens=[1],
            tokens=[2] * length,
            advantage=0.0,
            is_trained=True,
            sampler_log_probs=torch.zeros(length),
            reward=rewards[row].sum().item(),
            values=values[row, :length],
            is_written=mask[row, :length].bool(),
        )
        for row, length in enumerate(LENGTHS)
    ]


def verl_values():
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return, compute_value_loss

    rewards, values, new_values, mask = batch()
    table = {}
    for name, case in CASES.items():
        advantages, returns = compute_gae_advantage_return(
            rewards, values, mask, torch.tensor(case["gamma"]), torch.tensor(case["lam"])
        )
        predicted = new_values.clone().requires_grad_()
        loss, clipped = compute_value_loss(predicted, returns, values, mask, CLIP)
        loss.backward()
        table[name] = {
            "advantages": (advantages * mask).tolist(),
            "returns": (returns * mask).tolist(),
            "loss": loss.item(),
            "gradient": predicted.grad.tolist(),
            "clipped": clipped.item(),
        }
    return table


@pytest.mark.parametrize("name", CASES)
def test_advantages_returns_and_losses_are_those_of_verl(name):
    expected = json.loads(FILE.read_text())[name]
    settings = GRPOConfig(advantage_estimator="gae", critic=CriticConfig(**CASES[name]))
    completions = rollouts()
    set_advantages(completions, settings)
    _, values, new_values, mask = batch()
    returns = torch.zeros_like(values)
    for row, rollout in enumerate(completions):
        length = LENGTHS[row]
        torch.testing.assert_close(
            rollout.token_advantages,
            torch.tensor(expected["advantages"][row][:length]),
            rtol=1e-5,
            atol=1e-6,
        )
        returns[row, :length] = rollout.returns
    torch.testing.assert_close(returns, torch.tensor(expected["returns"]), rtol=1e-5, atol=1e-6)
    predicted = new_values.clone().requires_grad_()
    losses, is_clipped = value_losses(predicted, values, returns, CLIP)
    loss = (losses * mask).sum() / mask.sum()
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-5)
    assert ((is_clipped * mask).sum() / mask.sum()).item() == pytest.approx(expected["clipped"])
    torch.testing.assert_close(
        predicted.grad, torch.tensor(expected["gradient"]), rtol=1e-5, atol=1e-7
    )


def test_completions_out_of_the_loss_change_nothing():
    settings = GRPOConfig(advantage_estimator="gae")
    alone = rollouts()
    set_advantages(alone, settings)
    with_another = [*rollouts(), rollouts()[0]]
    with_another[-1].is_trained = False
    with_another[-1].reward = math.nan
    set_advantages(with_another, settings)
    for expected, found in zip(alone, with_another, strict=False):
        assert torch.equal(found.token_advantages, expected.token_advantages)
        assert torch.equal(found.returns, expected.returns)
    assert not with_another[-1].token_advantages.any()


def test_a_divergence_lowers_the_reward_of_each_token():
    """With values of 0, ``gamma`` 1 and ``lam`` 1, a return is the sum of the rewards from there on."""
    critic = CriticConfig(gamma=1.0, lam=1.0, kl_in_reward=True)
    settings = GRPOConfig(advantage_estimator="gae", critic=critic, beta=0.5, kl_estimator="k1")
    (rollout,) = rollouts()[1:2]
    rollout.values = torch.zeros(3)
    rollout.old_log_probs = torch.tensor([-1.0, -2.0, -3.0])
    rollout.reference_log_probs = torch.tensor([-1.5, -2.0, -2.0])
    rollout.reward = 2.0
    set_advantages([rollout], settings)
    torch.testing.assert_close(rollout.returns, torch.tensor([2.0 + 0.25, 2.0 + 0.5, 2.0 + 0.5]))


def test_one_token_has_no_advantage():
    assert standardize(torch.tensor([3.0])).item() == 0.0


if __name__ == "__main__":
    FILE.write_text(json.dumps(verl_values(), indent=1) + "\n")
