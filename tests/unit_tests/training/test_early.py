# SPDX-License-Identifier: Apache-2.0
"""Overrides are checked before torch is imported, with the sentences of the check on the real config."""

from types import NoneType
from typing import get_args

import pytest

from megatron.bridge.recipes.gemma import gemma3_4b_finetune_config
from megatron.bridge.recipes.llama import llama32_1b_pretrain_config
from megatron.bridge.training.config.early import EarlyConfig, check_early
from megatron.bridge.training.config.run_config import RunConfig
from megatron.bridge.utils.config.coerce import field_types
from megatron.bridge.utils.config.keys import dotted_keys
from megatron.bridge.utils.config.overrides import Layer, apply_overrides
from megatron.bridge.utils.errors import UserError


def early(*overrides, **values):
    check_early([Layer("file x", values), Layer("command line", overrides=overrides)])


def test_blocks_are_those_of_a_run():
    assert field_types(EarlyConfig).items() <= field_types(RunConfig).items()


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.train_itres=5"],
        ["trian.train_iters=5"],
        ["train.max_steps=5"],
        ["learning_rate=1"],
        ["train=5"],
        ["profiling=5"],
        ["train.train_iters=many"],
        ["train.train_iters=null"],
        ["scheduler.lr_decay_style=cosin"],
        ["train.train_iters=5", "train.train_iters=6"],
        ["train_iters"],
        ["dataset.split=[1,2"],
        ["train.train_iters=x", "rng.seed=y"],
        ["train.train_iters=x", "checkpoint.save=runs"],
    ],
    ids=" ".join,
)
def test_certain_mistakes_have_the_sentence_of_the_whole_check(overrides):
    with pytest.raises(UserError) as whole:
        apply_overrides(llama32_1b_pretrain_config(), overrides)
    with pytest.raises(UserError) as found:
        early(*overrides)
    assert str(found.value) == str(whole.value)


@pytest.mark.parametrize(
    "override",
    [
        *(
            "model.nope=1",
            "nope.nope=1",
            "train.hidden_size=1",
            "rng.seed=${nope}",
            "optimizer.lr=x",
        ),
        *("logger.sample_prompts[7]=x", "train={train_itres: 5}", "model.hidden_dropout=${nope}"),
    ],
)
def test_what_needs_the_whole_config_is_left_to_its_check(override):
    early(override)


def test_mistakes_are_reported_together():
    early("train.train_itres=5", "optimizer.lr=fast")
    early("train.train_itres=5", model={"num_layers": "x"})
    early("model.hidden_dropout=2", "model.num_layers=15")


def test_settings_of_a_file_are_checked():
    with pytest.raises(UserError, match=r"there is no train\.train_itres.*train\.train_iters"):
        early(train={"train_itres": 5})


def test_numbers_are_in_range():
    early("rng.seed=1", rng={"seed": -1})
    for typed in ("model.hidden_dropout=2", "model.hidden_dropout = 2"):
        with pytest.raises(UserError, match=r"model\.hidden_dropout=2: must lie in \[0, 1\)"):
            early(typed)


def test_no_key_of_another_block_counts_as_a_slip():
    config = gemma3_4b_finetune_config(peft="lora")
    for name in (
        "ft",
        "straggler",
        "distill",
        "dpo",
        "grpo",
        "comm_overlap",
        "rerun_state_machine",
        "inprocess_restart",
    ):
        (kind,) = (kind for kind in get_args(field_types(RunConfig)[name]) if kind is not NoneType)
        setattr(config, name, kind())
    others = [
        key for key in dotted_keys(config) if key.partition(".")[0] not in field_types(EarlyConfig)
    ]
    assert len(others) > 500
    early(*(f"{key}=x" for key in others))
