# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C saves a run; the same command continues it."""

import signal

import pytest

from megatron.bridge.training.callbacks import CallbackManager
from megatron.bridge.training.config import CheckpointConfig, ValidationConfig
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from tests.toy_run import toy_config
from tests.workers import forget_model_parallel

pytestmark = pytest.mark.usefixtures("one_process")


def run(folder, event, function):
    manager = CallbackManager()
    manager.register(event, function)
    config = toy_config(
        model={"num_layers": 1},
        train={"train_iters": 4},
        validation=ValidationConfig(),
        checkpoint=CheckpointConfig(save=str(folder), save_interval=100),
    )
    pretrain(config, forward_step, manager)


def test_ctrl_c_saves_after_the_step_and_the_same_command_continues(tmp_path, capfd):
    def press(run):
        if run.progress.step == 1:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)  # torchrun sends a second one

    with pytest.raises(SystemExit) as end:
        run(tmp_path, "on_grads_ready", press)
    assert end.value.code == 130
    assert "Ctrl-C" in capfd.readouterr().err
    forget_model_parallel()
    steps = []
    run(tmp_path, "on_train_step_end", lambda run: steps.append(run.progress.step))
    assert steps == [3, 4]
