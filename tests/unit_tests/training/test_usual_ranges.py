# SPDX-License-Identifier: Apache-2.0
"""Numbers that ruin a run without an error are noted; numbers with which nothing can follow are refused."""

import pytest

from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.config.resolve.usual_ranges import (
    ADAM_LR,
    SOFTMAX_SCALE,
    USUAL,
    unusual_numbers,
)
from tests.refusals import refused
from tests.toy_run import toy_config

WIDTH = 8  # of a head of the toy model
RANGES = {
    **{key: usual for key, usual in USUAL.items() if not key.startswith("distill.")},
    "optimizer.lr": ADAM_LR,
    "model.softmax_scale": SOFTMAX_SCALE.scaled_by(WIDTH**-0.5),
}


def changed(key, value, **blocks):
    config = toy_config(**blocks)
    block, _, name = key.partition(".")
    setattr(getattr(config, block), name, value)
    return config


def notes(key, value):
    config = changed(key, value, peft=LoRA())
    config.model.kv_channels = WIDTH
    return list(unusual_numbers(config))


def test_a_run_tells_its_notes():
    [note] = changed("optimizer.lr", 3.0).resolve(1).notes
    assert "optimizer.lr=3.0 " in note


@pytest.mark.parametrize("key", RANGES)
def test_a_number_far_from_published_runs_is_noted(key):
    usual = RANGES[key]
    assert not notes(key, usual.least) + notes(key, usual.most)
    [note] = notes(key, usual.most * 1.5)
    assert f"{key}={usual.most * 1.5} " in note
    assert f"{usual.most:g}" in note


@pytest.mark.parametrize(
    ("key", "value"), [("optimizer.adam_eps", 0.0), ("model.softmax_scale", 0.0)]
)
def test_a_number_that_cannot_work_is_refused(key, value):
    with refused(f"{key}={value}: must be"):
        changed(key, value).validate(1)
