# SPDX-License-Identifier: Apache-2.0
"""A critic against a plain loop over transformers' models, any layout against one process, resume, and export."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from megatron.bridge.cli.main import main
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.config.blocks.reinforcement import CriticConfig
from megatron.bridge.utils.errors import UserError
from tests.functional_tests.training.test_grpo import (
    EPSILON,
    LAYOUTS,
    RATE,
    STEPS,
    StopAfter,
    alone,
    log_probs,
    places,  # noqa: F401 - a fixture
    run,
)
from tests.toy_run import SEQUENCE, VOCABULARY
from tests.workers import leave

BETA, GAMMA, LAMBDA, CLIP, CRITIC_RATE = 0.1, 0.9, 0.8, 0.01, 4e-4
SETTINGS = {
    "advantage_estimator": "gae",
    "num_generations": 1,
    "num_iterations": 2,
    "beta": BETA,
    "kl_estimator": "k1",
}


def settings_of(root, **critic):
    options = {"model": str(root / "critic"), "lr": CRITIC_RATE, "cliprange_value": CLIP}
    options |= {"gamma": GAMMA, "lam": LAMBDA} | critic
    return {
        **SETTINGS,
        "reference": str(root / "other"),
        "critic": CriticConfig(**options),
    }


@pytest.fixture(scope="module")
def root(places):  # noqa: F811
    """The model, its reference, the prompts, and a reward model that the critic starts from."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQUENCE,
        initializer_range=0.2,
        num_labels=1,
        pad_token_id=0,
    )
    LlamaForSequenceClassification(config).save_pretrained(places / "critic")
    return places


def values_of(critic, rollout):
    """What transformers' classifier predicts before each token of a completion."""
    ids = torch.tensor([[*rollout.prompt_tokens, *rollout.tokens]])
    states = critic.model(ids).last_hidden_state
    return critic.score(states)[0, len(rollout.prompt_tokens) - 1 : -1, 0]


def returns_and_advantages(rewards, values):
    """The definition, a sum over all later tokens."""
    after = torch.cat((values[1:], torch.zeros(1)))
    errors = rewards + GAMMA * after - values
    advantages = torch.stack(
        [
            sum(
                (GAMMA * LAMBDA) ** (later - place) * errors[later]
                for later in range(place, len(errors))
            )
            for place in range(len(errors))
        ]
    )
    return advantages + values, advantages


def naive_losses(root, watched, kl_in_reward):
    """Two Adams on the completions of ``watched``: the clipped losses of policy and critic, means over tokens."""
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(root / name) for name in ("model", "other")
    )
    critic = AutoModelForSequenceClassification.from_pretrained(root / "critic")
    steps_of = {
        policy: torch.optim.Adam(policy.parameters(), RATE, (0.9, 0.999), EPSILON),
        critic: torch.optim.Adam(critic.parameters(), CRITIC_RATE, (0.9, 0.999), EPSILON),
    }
    losses = []
    for index, rollouts in enumerate(watched.rollouts):
        if index % 2 == 0:  # a new generation
            with torch.no_grad():
                old = [log_probs(policy, rollout, 1.0) for rollout in rollouts]
                of_reference = [log_probs(reference, rollout, 1.0) for rollout in rollouts]
                values = [values_of(critic, rollout) for rollout in rollouts]
            returns, advantages = [], []
            for rollout, before, frozen, predicted in zip(
                rollouts, old, of_reference, values, strict=True
            ):
                rewards = -BETA * (before - frozen) if kl_in_reward else torch.zeros_like(before)
                rewards[-1] += rollout.reward
                of_tokens = returns_and_advantages(rewards, predicted)
                returns.append(of_tokens[0])
                advantages.append(of_tokens[1])
            every = torch.cat(advantages)
            advantages = [(part - every.mean()) / every.std() for part in advantages]
        policy_loss, value_loss, tokens = 0.0, 0.0, 0
        for place, rollout in enumerate(rollouts):
            now = log_probs(policy, rollout, 1.0)
            ratio = (now - old[place]).exp()
            surrogate = torch.min(
                ratio * advantages[place], ratio.clamp(0.8, 1.2) * advantages[place]
            )
            kl = 0.0 if kl_in_reward else BETA * (now - of_reference[place]) * ratio
            policy_loss = policy_loss + (kl - surrogate).sum()
            predicted = values_of(critic, rollout)
            limited = torch.clamp(predicted, values[place] - CLIP, values[place] + CLIP)
            errors = [(part - returns[place]) ** 2 for part in (predicted, limited)]
            value_loss = value_loss + torch.max(*errors).sum() / 2
            tokens += len(rollout.tokens)
        losses.append((policy_loss.item() / tokens, value_loss.item() / tokens))
        for model, loss in ((policy, policy_loss), (critic, value_loss)):
            steps_of[model].zero_grad()
            (loss / tokens).backward()
            steps_of[model].step()
    return losses


@pytest.mark.parametrize("kl_in_reward", [False, True])
def test_losses_are_those_of_a_plain_loop(root, kl_in_reward):
    watch = alone(root, settings_of(root, kl_in_reward=kl_in_reward))
    found = [(step["grpo loss"], step["value loss"]) for step in watch.steps]
    for step, expected in zip(found, naive_losses(root, watch, kl_in_reward), strict=True):
        assert step == pytest.approx(expected, abs=5e-6, rel=1e-4)
    assert any(step["clipped values"] > 0 for step in watch.steps)
    assert len({value_loss for _, value_loss in found}) == STEPS
    assert all(step["explained variance"] < 1 for step in watch.steps)
    assert "groups without signal" not in watch.steps[0]


def all_layouts(root, peft):
    adapters = LoRA(dim=4) if peft else None
    return {
        name: run(root, settings_of(root), layout=layout, peft=adapters).steps
        for name, layout in LAYOUTS.items()
        if not peft or name in ("sp2", "pp2")
    }


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_two_processes(root, two_workers, peft):
    expected = alone(root, settings_of(root), peft=LoRA(dim=4) if peft else None).steps
    for rank in two_workers.run(all_layouts, root, peft):
        for name, steps in rank.items():
            for found, wanted in zip(steps, expected, strict=True):
                assert found == pytest.approx(wanted, rel=5e-5, abs=1e-5), name


def stopped(root, folder, *stops, **options):
    watches = [
        run(
            root,
            settings_of(root),
            callbacks=[StopAfter(stop)],
            save=str(folder),
            steps=6,
            **options,
        )
        for stop in stops
    ]
    return [step for watch in watches for step in watch.steps], watches[-1].weights


def test_resume_is_exact(root, tmp_path, capsys):
    """Within a generation and at its end; the critic is saved with the policy, and exported on its own."""
    torch.set_num_threads(1)
    expected, weights = stopped(root, tmp_path / "one", 6)
    found, resumed = stopped(root, tmp_path / "three", 1, 4, 6)
    leave()
    assert found == expected
    assert all(map(torch.equal, resumed, weights))
    assert main(
        [
            *("export", "--megatron-path", str(tmp_path / "three" / "critic")),
            *("--hf-model", str(root / "critic"), "--hf-path", str(tmp_path / "critic-hf")),
        ]
    ) in (0, None)
    before = AutoModelForSequenceClassification.from_pretrained(root / "critic")
    trained = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic-hf")
    assert trained.config.num_labels == 1
    assert not torch.equal(trained.score.weight, before.score.weight)


def test_a_policy_without_its_critic_does_not_resume(root, tmp_path):
    stopped(root, tmp_path, 2)
    leave()
    (tmp_path / "critic" / "iter_0000002").rename(tmp_path / "gone")
    with pytest.raises(UserError) as refusal:
        stopped(root, tmp_path, 4)
    leave()
    message = str(refusal.value)
    assert str(tmp_path / "critic" / "iter_0000002") in message
    assert "checkpoint.finetune=true" in message


def test_resume_in_another_layout(root, tmp_path, two_workers):
    torch.set_num_threads(1)
    expected, _ = stopped(root, tmp_path / "one", 6)
    first, _ = stopped(root, tmp_path / "run", 3)
    leave()
    for rest, _ in two_workers.run(stopped, root, tmp_path / "run", 6):
        for found, wanted in zip([*first, *rest], expected, strict=True):
            assert found == pytest.approx(wanted, rel=5e-5, abs=1e-5)


def test_a_language_model_gets_a_head(root):
    """Without ``critic.model`` the critic starts from the policy; a model with another head is refused."""
    settings = {"advantage_estimator": "gae", "num_generations": 1}
    watch = alone(root, settings, steps=2)
    assert all(step["value loss"] > 0 for step in watch.steps)
    config = LlamaConfig.from_pretrained(root / "critic")
    config.num_labels = 3
    torch.manual_seed(4)
    LlamaForSequenceClassification(config).save_pretrained(root / "three-classes")
    with pytest.raises(UserError) as refusal:
        alone(root, settings_of(root, model=str(root / "three-classes")))
    leave()
    assert "grpo.critic.model" in str(refusal.value)
    assert "3 outputs" in str(refusal.value)
