# SPDX-License-Identifier: Apache-2.0
"""A forward step is recognised by its hints or names, and called accordingly."""

import json
import os
import time
from functools import partial

import pytest

from megatron.bridge.training import gpt_step
from megatron.bridge.training.setup import check_forward_step
from megatron.bridge.training.state import Run
from megatron.bridge.training.step.forward_step import (
    bind_state,
    returns_schedule_plan,
    takes_state,
)
from megatron.bridge.utils.errors import UserError
from tests.refusals import refused
from tests.toy_run import toy_config


def plain(data_iterator, model):
    return "plain", data_iterator, model


def plain_with_plan(data_iterator, model, return_schedule_plan=False):
    return "plain", data_iterator, model, return_schedule_plan


def stateful(state, data_iterator, model):
    return state, data_iterator, model


def stateful_with_plan(state, data_iterator, model, return_schedule_plan: bool = False):
    return state, data_iterator, model, return_schedule_plan


def hinted(anything: Run, batches, network):
    return anything, batches, network


def hinted_by_text(anything: "GlobalState", batches, network):  # noqa: F821 - the name scripts use
    return anything, batches, network


class Step:
    def __call__(self, data_iterator, model):
        return "object", data_iterator, model


@pytest.mark.parametrize("step", [int, time.time, os, os.getcwd, json.dumps])
def test_what_is_no_forward_step_is_refused(step):
    with refused("forward", "write it as (data_iterator, model) or (state, data_iterator, model)"):
        takes_state(step)


@pytest.mark.parametrize(
    "step", [plain, plain_with_plan, Step(), partial(stateful, "bound"), gpt_step.forward_step]
)
def test_two_arguments_are_called_as_they_are(step):
    assert takes_state(step) is False
    assert bind_state(step, run=None) is step


@pytest.mark.parametrize("step", [stateful, stateful_with_plan, hinted, hinted_by_text])
def test_three_arguments_get_the_run(step):
    assert takes_state(step) is True
    assert bind_state(step, run="the run")("batches", "model")[:3] == (
        "the run",
        "batches",
        "model",
    )


def test_schedule_plan_is_passed_through():
    assert (
        bind_state(stateful_with_plan, run=0)("batches", "model", return_schedule_plan=True)[3]
        is True
    )
    assert returns_schedule_plan(stateful_with_plan)
    assert not returns_schedule_plan(stateful)


def one(model):
    pass


def test_a_step_that_shares_no_samples_is_refused_where_ranks_do():
    config = toy_config(model={"hybrid_context_parallel": True})
    check_forward_step(gpt_step.forward_step, config)
    with pytest.raises(
        UserError, match=r"hybrid_context_parallel=True needs .* takes_shared_samples=True"
    ):
        check_forward_step(one_chunk, config)


def one_chunk(data_iterator, model):
    pass


def four(state, data_iterator, model, more):
    pass


def state_without_data(state, model):
    pass


def state_last(data_iterator, model, state):
    pass


@pytest.mark.parametrize("step", [one, four, state_without_data, state_last])
def test_other_forms_are_refused_by_name(step):
    with pytest.raises(
        UserError, match=rf"forward step {step.__name__}\(.*unsupported signature: write it as"
    ):
        takes_state(step)
