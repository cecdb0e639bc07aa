# SPDX-License-Identifier: Apache-2.0
"""What a loss function may return, and what is refused with a sentence."""

import pytest
import torch

from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.step.forward_step import checked
from megatron.bridge.training.step.losses import sum_and_count
from tests.refusals import refused
from tests.toy_run import toy_config

LOSS = torch.tensor(2.0)


def result(found, per_token=False):
    step = checked(lambda data, model: (data, lambda output: found), per_token)
    output, loss_function = step("output", "model")
    return loss_function(output)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(3.0), [3, 1]),
        (torch.tensor([6.0, 2.0]), [6, 2]),
        ((torch.tensor(6.0), torch.tensor(2)), [6, 2]),
        ([torch.tensor([6.0]), 2], [6, 2]),
        (3.0, [3, 1]),
        ((6.0, 2), [6, 2]),
    ],
)
def test_reports_of_every_form_are_sums_and_counts(value, expected):
    loss, report = result([LOSS, {"own": value}])
    assert loss is LOSS
    assert sum_and_count(report["own"]).tolist() == expected
    _, tokens, report = result((LOSS, 5, {"own": value}), per_token=True)
    assert tokens.item() == 5
    assert not tokens.is_floating_point()


def test_numbers_are_made_on_the_device_of_the_loss():
    """Those of a GPU cannot be added to those of the CPU; meta stands for a device that is not the CPU."""
    meta = torch.device("meta")
    _, tokens, report = result((torch.tensor(2.0, device=meta), 5, {"a": 3.0, "b": (6.0, 2)}))
    assert {tokens.device, *(value.device for value in report.values())} == {meta}


@pytest.mark.parametrize(
    ("found", "parts"),
    [
        (LOSS, ["tensor of shape []", "(loss, report)", "(loss, num_tokens, report)"]),
        ((LOSS,), ["a tuple of 1 values", "(loss, report)"]),
        ((torch.ones(3), {}), ["shape [3]", "one element"]),
        ((2.0, {}), ["a float as the loss"]),
        ((LOSS, LOSS), ["as the report", "dict"]),
        ((LOSS, torch.ones(2), {}), ["num_tokens", "[2]"]),
        ((LOSS, 2.5, {}), ["num_tokens", "whole number"]),
        ((LOSS, {"own": torch.ones(3)}), ["own", "[3]", "a sum and a count"]),
        ((LOSS, {"own": (1, 2, 3)}), ["own", "a tuple of 3 values"]),
    ],
)
def test_other_forms_are_refused(found, parts):
    with refused("the loss function", *parts):
        result(found)


def test_a_loss_per_token_needs_the_number_of_tokens():
    with refused("num_tokens", "model.calculate_per_token_loss=True"):
        result((LOSS, {}), per_token=True)


@pytest.mark.parametrize("found", [LOSS, (LOSS, "no function"), (LOSS, None, None)])
def test_a_forward_step_returns_an_output_and_a_function(found):
    with refused("the forward step returned", "loss function"):
        checked(lambda: found, False)()


@pytest.mark.usefixtures("one_process")
def test_other_names_in_a_later_microbatch_are_refused():
    names = iter(["first"] * 4 + ["second"] * 100)

    def step(data_iterator, model):
        output, loss_function = forward_step(data_iterator, model)
        return output, lambda tensor: (*loss_function(tensor)[:2], {next(names): 1.0})

    with refused("the loss function reported first before, and now second"):
        pretrain(
            toy_config(model={"num_layers": 1}, train={"train_iters": 3, "micro_batch_size": 2}),
            step,
        )
