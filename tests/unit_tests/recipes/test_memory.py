# SPDX-License-Identifier: Apache-2.0
"""Recipes fit the GPUs that they name, use what they say, and share a model over no more than they must."""

import math
from dataclasses import replace

import pytest

from megatron.bridge.autotune.gpus import gpu
from megatron.bridge.autotune.memory import fullest_stage, memory_per_rank
from megatron.bridge.autotune.reserve import reserve_of
from megatron.bridge.recipes.catalog import catalog, find
from megatron.bridge.recipes.teachers import critic_of, teacher_of
from megatron.bridge.training.config.resolve.data import has_tower
from megatron.bridge.utils.errors import UserError
from tests.toy_run import save_llama

SIZES = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "CP": "context_parallel_size",
    "EP": "expert_model_parallel_size",
}
# one of each kind of model and of layout; all of them take minutes
SAMPLE = (
    "deepseek_v2_lite_pretrain_config",
    "gemma3_1b_finetune_config",
    "gpt_oss_20b_finetune_config",
    "llama3_8b_16k_pretrain_config",
    "llama3_8b_fp8_pretrain_config",
    "nemotronh_4b_pretrain_config",
    "qwen15_moe_a2p7b_finetune_config",
    "qwen3_next_80b_a3b_pretrain_config",
    "smollm2_50m_distill_config",
)


def recipes():
    for recipe in catalog().values():
        yield pytest.param(
            recipe, marks=() if recipe.name in SAMPLE else pytest.mark.slow, id=recipe.name
        )


def taught(**options):
    """Memory with and without the teacher, of the stages of a run that distills SmolLM2 135M."""
    config, world_size = find("smollm2_50m_distill_config")(**options), 2
    config = config.resolve(world_size).config
    teacher = teacher_of(config, world_size)
    assert teacher.num_layers == 30
    return memory_per_rank(config, world_size, teacher), memory_per_rank(config, world_size)


def test_a_critic_is_counted():
    """Its weights, gradients and optimizer are those of the policy but for the output layer, which is one number."""
    config = find("qwen3_600m_grpo_config")()
    config.grpo.advantage_estimator = "gae"
    config = config.resolve(world_size=1).config
    (rank,) = memory_per_rank(config, 1, None, critic_of(config, 1))
    (alone,) = memory_per_rank(config, 1)
    assert replace(rank, critic=0) == alone
    assert rank.total == alone.total + rank.critic
    head = config.model.hidden_size
    bytes_of_weight = 2 + 4 + 12
    assert rank.critic == alone.states + head * bytes_of_weight
    config.grpo.advantage_estimator = "group"
    assert critic_of(config, 1) is None


TEACHERS_WEIGHTS = 134_515_008 * 2  # published parameters, in bf16
TEACHERS_LOGITS = 16 * 2048 * 49152 * (2 + 4)  # and the gradient of the divergence, in fp32


def test_a_teacher_is_counted():
    (rank,), (alone,) = taught()
    assert replace(rank, teacher=0) == alone
    assert rank.total == alone.total + rank.teacher
    assert 0 < rank.teacher - TEACHERS_WEIGHTS - TEACHERS_LOGITS < 0.4e9, (
        "what one layer holds while it runs"
    )


def test_a_teacher_has_its_logits_on_the_last_stage():
    (first, last), _ = taught(pipeline_model_parallel_size=2)
    assert TEACHERS_WEIGHTS / 2 < first.teacher < 0.7e9
    assert (
        TEACHERS_WEIGHTS / 2 + TEACHERS_LOGITS
        < last.teacher
        < TEACHERS_WEIGHTS / 2 + TEACHERS_LOGITS + 0.5e9
    )


def test_what_is_known_of_teachers(tmp_path):
    config = find("smollm2_50m_distill_config")()
    config = config.resolve(1).config
    config.distill.teacher = "nobody/knows"
    assert teacher_of(config, 1) is None
    config.distill.teacher = str(save_llama(tmp_path / "teacher", vocab_size=96))
    with pytest.raises(
        UserError, match=r"distill.teacher=\S+: its vocabulary size is 96, the student's is 49152"
    ):
        teacher_of(config, 1)
    config.distill.cache = "there"
    assert teacher_of(config, 1) is None, "its logits are there"


UNCERTAIN = 0.08  # of the activations: as far from live storages as a count may be (docs/tuner.md)


def used(recipe, activations=1.0, **options):
    """Bytes of tensors, and whether they fit, if activations take ``activations`` times what is counted."""
    config = recipe(**options)
    config = config.resolve(recipe.gpus).config
    fullest = fullest_stage(memory_per_rank(config, recipe.gpus, teacher_of(config, recipe.gpus)))
    total = fullest.total + (activations - 1) * fullest.activations
    return total, reserve_of(config, recipe.gpus, recipe.gpu_kind).around(total) <= gpu(
        recipe.gpu_kind
    ).memory


@pytest.mark.parametrize("recipe", list(recipes()))
class TestMemory:
    def test_is_what_the_catalog_says_and_fits(self, recipe):
        """`make recipes` writes the number."""
        total, fits = used(recipe)
        assert math.ceil(total / 1e9) == recipe.memory_gb
        assert fits

    def test_half_of_any_size_does_not_fit(self, recipe):
        """A layout may leave room for what the count of activations can miss, and for the images of a tower."""
        if recipe.layout == "no model parallelism" or has_tower(recipe()):
            return
        for name, size in layout(recipe):
            try:
                _, fits = used(recipe, activations=1 + UNCERTAIN, **half(recipe, name, size))
            except UserError:
                continue  # not every half is a layout
            assert not fits, f"{name}{size // 2} fits"


def layout(recipe):
    """The sizes in the catalog, which are those of the config."""
    parts = recipe.layout.split()
    found = [(part[:2], int(part[2:])) for part in parts]
    model = recipe().model
    assert dict(found) == {
        name: getattr(model, key) for name, key in SIZES.items() if getattr(model, key) > 1
    }
    return found


def half(recipe, name, size):
    options = {SIZES[name]: size // 2}
    if (name, size) == ("PP", 2):
        options["virtual_pipeline_model_parallel_size"] = None
    return options
