# SPDX-License-Identifier: Apache-2.0
"""A run resumes only with a model that computes what the checkpoint's model computes."""

import shutil

import pytest
import torch.nn.functional as F

from megatron.bridge.training.config import CheckpointConfig, ValidationConfig
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.utils.errors import UserError
from tests.toy_run import toy_config
from tests.workers import forget_model_parallel, leave


def config_of(folder, steps, allowed=(), **model):
    config = toy_config(
        model={"num_layers": 1},
        train={"train_iters": steps},
        validation=ValidationConfig(),
        checkpoint=CheckpointConfig(
            save=str(folder), save_interval=1, allow_model_change=list(allowed)
        ),
    )
    config.scheduler.override_opt_param_scheduler = True
    for name, value in model.items():
        assert getattr(config.model, name) != value
        setattr(config.model, name, value)
    return config


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    pretrain(config_of(folder, 1), forward_step)
    forget_model_parallel()
    yield folder
    leave()


@pytest.mark.parametrize(
    "change",
    [
        {"rotary_base": 500000},
        {"rotary_percent": 0.5},
        {"layernorm_epsilon": 1e-3},
        {"activation_func": F.relu},
        {"softmax_scale": 0.5},
        {"window_size": (4, 0)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_function_of_the_same_shapes_is_refused_unless_it_is_allowed(
    saved, tmp_path, change
):
    folder = shutil.copytree(saved, tmp_path / "run")
    [name] = change
    with pytest.raises(UserError, match=rf"model\.{name} is .*checkpoint .*allow_model_change"):
        pretrain(config_of(folder, 2, **change), forward_step)
    forget_model_parallel()
    run = pretrain(config_of(folder, 2, allowed=[name], **change), forward_step)
    assert run.progress.step == 2
    forget_model_parallel()


def test_what_does_not_change_the_function_may_differ(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "run")
    run = pretrain(config_of(folder, 2, attention_dropout=0.1, init_method_std=0.5), forward_step)
    assert run.progress.step == 2
    forget_model_parallel()


def test_an_unknown_name_in_the_list_is_refused(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "run")
    with pytest.raises(
        UserError, match=r"allow_model_change=.*rotary_bsae.*did you mean rotary_base"
    ):
        pretrain(config_of(folder, 2, allowed=["rotary_bsae"]), forward_step)
    forget_model_parallel()
