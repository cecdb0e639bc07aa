# SPDX-License-Identifier: Apache-2.0
"""Several adapters that train at once: each one's numbers are those of a run without the others."""

import dataclasses
import math

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.adapter_trainer import AdamSettings
from megatron.bridge.training.step.row_losses import TrainingRow, compute_loss
from megatron.bridge.utils.errors import UserError
from tests.toy_adapters import make
from tests.toy_trainer import METHODS, SETTINGS, make_rows, make_trainer, train, weights
from tests.workers import forget_model_parallel, leave


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    make("llama", directory)
    return directory


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    leave()


def make_full_trainer(directory):
    trainer = make_trainer(directory)
    for name, method in METHODS.items():
        trainer.add(name, method)
    return trainer


def test_each_adapter_learns_as_if_it_were_alone(llama):
    together = make_full_trainer(llama)
    losses = train(together, list(METHODS))
    for name, method in METHODS.items():
        forget_model_parallel()
        alone = make_trainer(llama)
        alone.add(name, method)
        losses_alone = train(alone, [name])
        places = [index for index, row in enumerate(make_rows()) if row.adapter == name]
        for step, step_alone in zip(losses, losses_alone, strict=True):
            assert [step[index] for index in places] == pytest.approx(step_alone, abs=1e-5)
        torch.testing.assert_close(
            weights(together, name), weights(alone, name), rtol=1e-6, atol=1e-6
        )


def test_gradients_and_steps_are_those_of_the_peft_library(llama, tmp_path):
    trainer = make_full_trainer(llama)
    train(trainer, list(METHODS), steps=1)  # factors B are not zero any more
    trainer.export("small", tmp_path / "before")
    base = AutoModelForCausalLM.from_pretrained(llama)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "before", is_trainable=True)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    loss = 0.0
    for row in make_rows():
        if row.adapter == "small":
            logits = model(torch.tensor([row.tokens])).logits[0]
            logprobs = logits.log_softmax(-1)[range(len(row.targets)), row.targets]
            loss = loss - (logprobs * torch.tensor(row.weights)).sum()
    loss.backward()
    norm = torch.stack([value.grad.norm() for value in trained.values()]).norm()

    trainer.forward_backward(make_rows())
    assert trainer.step("small", AdamSettings(learning_rate=0.0)) == pytest.approx(
        float(norm), rel=1e-5
    )
    trainer.forward_backward(make_rows())
    before = weights(trainer, "large")
    trainer.step("small", AdamSettings(learning_rate=0.5))
    assert torch.equal(weights(trainer, "large"), before)


def test_a_diverged_adapter_reaches_no_other(llama):
    broken = make_full_trainer(llama)
    with torch.no_grad():
        for parameter in broken._adapters.parameters("small"):
            parameter.fill_(math.nan)
    results = broken.forward_backward(make_rows())
    forget_model_parallel()
    sound = make_full_trainer(llama)
    expected = sound.forward_backward(make_rows())
    for row, result, expected_result in zip(make_rows(), results, expected, strict=True):
        is_broken = row.adapter == "small"
        assert any(math.isnan(logprob) for logprob in result.logprobs) == is_broken
        assert is_broken or result.logprobs == pytest.approx(expected_result.logprobs, abs=1e-6)
    with pytest.raises(UserError, match="adapter 'small': the norm of the gradient is nan"):
        broken.step("small", SETTINGS["small"])
    assert broken.steps("small") == 0
    for name in ("large", "last"):
        broken.step(name, SETTINGS[name])
        sound.step(name, SETTINGS[name])
        torch.testing.assert_close(
            weights(broken, name), weights(sound, name), rtol=1e-6, atol=1e-6
        )


def test_a_saved_adapter_goes_on_bitwise_next_to_others(llama, tmp_path):
    trainer = make_full_trainer(llama)
    train(trainer, list(METHODS))
    trainer.save("small", tmp_path / "state")
    losses = train(trainer, ["small"])
    last = weights(trainer, "small")
    others = weights(trainer, "large")

    trainer.load("small", tmp_path / "state")
    trainer.load("copy", tmp_path / "state")
    trainer.load("anew", tmp_path / "state", with_optimizer=False)
    assert trainer.steps("anew") == 0
    assert torch.equal(weights(trainer, "anew"), weights(trainer, "copy"))
    moments = [state["exp_avg"] for state in trainer._optimizers["anew"].state.values()]
    assert moments
    assert not any(moment.any() for moment in moments)
    assert trainer.steps("small") == trainer.steps("copy") == 3
    assert train(trainer, ["small"]) == losses
    assert torch.equal(weights(trainer, "small"), last)
    assert torch.equal(weights(trainer, "large"), others)


def test_an_exported_adapter_gives_the_same_log_probabilities_in_peft(llama, tmp_path):
    trainer = make_full_trainer(llama)
    train(trainer, list(METHODS))
    for row, result in zip(make_rows(), trainer.forward(make_rows()), strict=True):
        trainer.export(row.adapter, tmp_path / row.adapter)
        base = AutoModelForCausalLM.from_pretrained(llama)
        model = peft.PeftModel.from_pretrained(base, tmp_path / row.adapter)
        with torch.no_grad():
            logprobs = model(torch.tensor([row.tokens])).logits[0].log_softmax(-1)
        expected = logprobs[range(len(row.targets)), row.targets].tolist()
        assert result.logprobs == pytest.approx(expected, abs=1e-4)


def test_wrong_requests_change_nothing(llama, tmp_path):
    trainer = make_full_trainer(llama)
    good = make_rows()[0]
    wrong = {
        "adapter 'other' does not exist": {"adapter": "other"},
        "tokens has an id outside the vocabulary": {"tokens": [10**6] * len(good.tokens)},
        "targets has 1 entries": {"targets": [1], "weights": None},
        "weights has a number that is not finite": {"weights": [math.nan] * len(good.tokens)},
        "use one of cross_entropy": {"loss": "mse"},
        "sampled_logprobs has no entries": {"loss": "ppo"},
    }
    for message, changes in wrong.items():
        with pytest.raises(UserError, match=f"row 1: .*{message}"):
            trainer.forward_backward([good, dataclasses.replace(good, **changes)])
    assert all(value.grad is None for value in trainer._adapters.parameters("small"))
    with pytest.raises(UserError, match="learning_rate=nan"):
        trainer.step("small", AdamSettings(learning_rate=math.nan))
    with pytest.raises(UserError, match="learning_rate=3e\\+38"):
        trainer.step("small", AdamSettings(learning_rate=3e38))
    with pytest.raises(UserError, match="beta2=1"):
        trainer.step("small", AdamSettings(beta2=1))
    with pytest.raises(UserError, match="adapter 'small' exists"):
        trainer.add("small", LoRA())
    with pytest.raises(UserError, match="only LoRA"):
        trainer.add("dora", DoRA())
    with pytest.raises(UserError, match=r"dropout=0\.1"):
        trainer.add("dropped", LoRA(dropout=0.1))
    with pytest.raises(UserError, match="word_embeddings"):
        trainer.add("embedding", LoRA(target_modules=["word_embeddings"]))
    assert trainer.names == tuple(METHODS)
    trainer.forward_backward([good])
    with pytest.raises(UserError, match="call step before save"):
        trainer.save("small", tmp_path / "waiting")


def test_rows_of_one_token_and_removed_adapters(llama):
    trainer = make_full_trainer(llama)
    trainer.remove("large")
    (result,) = trainer.forward([TrainingRow("small", [1], [2])])
    assert result.loss == pytest.approx(-result.logprobs[0])
    with pytest.raises(UserError, match="adapter 'large' does not exist"):
        trainer.step("large", AdamSettings())


@pytest.mark.parametrize("loss", ["cispo", "dro"])
def test_losses_of_a_padded_row(loss):
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)
    sampled, advantages = [-1.5, -1.8, -0.6], [1.0, -2.0, 0.5]
    row = TrainingRow(
        "a",
        [1, 2, 3],
        [2, 3, 4],
        loss=loss,
        sampled_logprobs=sampled,
        advantages=advantages,
        beta=0.3,
    )
    padded = [torch.tensor([*values, 0.0]) for values in (advantages, sampled)]
    found = compute_loss(row, logprobs, *padded, torch.arange(4))
    expected = 0.0
    for logprob, old, advantage in zip(logprobs[:3], sampled, advantages, strict=True):
        if loss == "dro":
            expected = expected - (logprob * advantage - 0.15 * (logprob - old) ** 2)
        else:
            ratio = min(max(math.exp(logprob.item() - old), 0.8), 1.2)
            expected = expected - ratio * advantage * logprob
    assert found.item() == pytest.approx(expected.item())
    (gradient,) = torch.autograd.grad(found, logprobs)
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)
    torch.testing.assert_close(gradient, expected_gradient)
    with pytest.raises(UserError, match="beta=-1"):
        dataclasses.replace(row, beta=-1.0).check(10, 10)
