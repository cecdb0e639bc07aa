# SPDX-License-Identifier: Apache-2.0
"""Recipes for many GPUs that are started on one process."""

import pytest

from megatron.bridge.cli.support.one_process import fit_to_one_process
from megatron.bridge.cli.support.train_job import TrainJob
from megatron.bridge.recipes.catalog import catalog
from megatron.bridge.utils.config.origins import Origins
from megatron.bridge.utils.config.overrides import apply_overrides
from megatron.bridge.utils.errors import UserError

NAMES = [
    "llama3_70b_pretrain_config",  # tensor and virtual pipeline ranks
    "llama3_8b_128k_pretrain_config",  # context ranks
    "deepseek_v3_pretrain_config",  # a layout of stages, experts, multi-token prediction
    "qwen3_30b_a3b_finetune_config",
    "llama32_1b_pretrain_config",  # has no model parallelism
]


def job_of(name, overrides=()):
    recipe = catalog()[name]
    config = recipe()
    changes = apply_overrides(config, overrides)
    return TrainJob(config, Origins.of(config), name, "pretrain", recipe.gpus, recipe, changes)


@pytest.mark.parametrize("name", NAMES)
def test_recipes_fit_one_process(name):
    job = job_of(name)
    fit_to_one_process(job)
    resolved = job.resolve(1)
    assert not resolved.problems
    resolved.config.validate(1)
    has_ranks = job.recipe.layout != "no model parallelism"
    assert [name in note for note in resolved.notes if "one process" in note] == [True] * has_ranks


def test_a_size_that_the_user_chose_stays():
    job = job_of(NAMES[0], ["model.tensor_model_parallel_size=2"])
    fit_to_one_process(job)
    assert job.config.model.tensor_model_parallel_size == 2
    with pytest.raises(UserError, match="tensor_model_parallel_size=2"):
        job.resolve(1)
