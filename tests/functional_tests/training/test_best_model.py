# SPDX-License-Identifier: Apache-2.0
"""The best evaluation: its checkpoint is kept, the run ends early, and a resumed run does the same."""

import pytest

from megatron.bridge.checkpoint import paths
from megatron.bridge.training.config import CheckpointConfig, ValidationConfig
from megatron.bridge.utils.errors import UserError
from tests.functional_tests.conftest import leave
from tests.toy_run import run_toy

pytestmark = pytest.mark.usefixtures("run_in_process")
# the loss of a run falls: the first evaluation is the best one of "max", the last one that of "min"
WORSE = {"metric": "lm loss", "metric_mode": "max", "patience": 2}


def run(folder, steps=10, exit_interval=None, **validation):
    record = run_toy(
        {
            "train": {"train_iters": steps, "exit_interval": exit_interval},
            "validation": ValidationConfig(eval_interval=2, eval_iters=1, **validation),
            "checkpoint": CheckpointConfig(
                save=str(folder), save_interval=3, most_recent_k=1, keep_best=True
            ),
        }
    )
    leave()
    return record


def test_a_run_ends_when_no_better_evaluation_comes(tmp_path):
    record = run(tmp_path, **WORSE)
    assert len(record.losses) == 6  # evaluations at 2 (the best), 4 and 6
    assert paths.published_iterations(tmp_path) == [2, 6]
    assert paths.best_iteration(tmp_path) == 2
    again = run(tmp_path, **WORSE)
    assert again.losses == [], "a resumed run has nothing left to do"
    assert paths.published_iterations(tmp_path) == [2, 6]


def test_a_resumed_run_ends_at_the_same_step(tmp_path):
    whole = run(tmp_path / "whole", **WORSE)
    first = run(tmp_path / "parts", exit_interval=5, **WORSE)
    second = run(tmp_path / "parts", **WORSE)
    assert first.losses + second.losses == whole.losses
    assert paths.published_iterations(tmp_path / "parts") == [2, 6]
    assert paths.best_iteration(tmp_path / "parts") == 2


def test_the_last_evaluation_may_be_the_best(tmp_path):
    record = run(tmp_path, steps=5, patience=2)
    assert len(record.losses) == 5
    assert paths.best_iteration(tmp_path) == 5
    assert paths.published_iterations(tmp_path) == [5]


def test_small_improvements_count_only_beyond_min_delta(tmp_path):
    record = run(tmp_path, min_delta=100.0, patience=1)
    assert len(record.losses) == 4
    assert paths.best_iteration(tmp_path) == 2


def test_an_unknown_metric_is_named(tmp_path):
    with pytest.raises(UserError, match=r"validation.metric=accuracy .*lm loss"):
        run(tmp_path, metric="accuracy", patience=1)


def test_evaluations_are_needed(tmp_path):
    with pytest.raises(UserError, match=r"validation.patience.*validation.eval_interval"):
        run_toy({"validation": ValidationConfig(patience=1)})
