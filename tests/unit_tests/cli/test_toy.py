# SPDX-License-Identifier: Apache-2.0
"""What a rehearsal shrinks, and what it keeps."""

import pytest

from megatron.bridge.autotune import ranks
from megatron.bridge.cli import rehearse, toy
from megatron.bridge.cli.job import Job
from megatron.bridge.cli.toy import Layout
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.recipes.catalog import find

LAYOUTS = [
    (Layout(2, 2, 1, 2, 1, 2), Layout(2, 2, 1, 2, 1, 2)),  # small enough
    (Layout(8, 4, 1, 16, 1, 8), Layout(2, 2, 1, 2, 1, 2)),
    (Layout(8, 8, 4, 4, 1, 8), Layout(2, 2, 2, 1, 1, 2)),  # no room for replicas
    (Layout(1, 16, 1, 64, 64, 1), Layout(1, 2, 1, 2, 2, 1)),  # experts over replicas
    (Layout(4, 8, 1, 8, 8, 1), Layout(2, 2, 1, 2, 2, 1)),
    (Layout(4, 1, 1, 16, 8, 4), Layout(2, 1, 1, 2, 2, 2)),  # experts are cut, too
]


@pytest.mark.parametrize("size", ["49b", "253b"])
def test_layers_that_are_described_one_by_one_keep_their_kinds(size):
    recipe = find(f"llama_nemotron_{size}_pretrain_config")
    config = recipe.build()
    config.validate(recipe.gpus)
    small = toy.shrink(config, recipe.gpus, steps=1)
    small.config.validate(small.layout.ranks)
    before, after = (model.per_block_parameters for model in (config.model, small.config.model))
    assert {block.attention.num_query_groups for block in before} == {None, 8}
    assert {block.attention.num_query_groups for block in after} == {None, 4}
    kinds = [
        {(block["attention"]["no_op"], block["ffn"]["ffn_mult"]) for block in model.block_configs}
        for model in (config.model, small.config.model)
    ]
    assert kinds[0] == kinds[1]
    assert len(kinds[1]) <= small.config.model.num_layers <= len(kinds[1]) + 1
    assert ranks.parameter_count(small.config.model) < 3_000_000
    assert AutoBridge.hf_config_of(small.config.model)["block_configs"] == small.config.model.block_configs


def test_a_toy_to_tune_predicts_one_token():
    """Transformers makes it."""
    recipe = find("deepseek_v3_finetune_config")
    small = rehearse._shrunk(Job(recipe.build(), recipe.name, "sft", recipe.gpus, recipe), recipe.gpus, 1)
    assert small.config.model.mtp_num_layers is None
    assert AutoBridge.hf_config_of(small.config.model)["num_nextn_predict_layers"] == 0
    assert any("predicts one token" in change for change in small.changes)


def test_heads_that_are_normed_together_are_as_wide_as_the_model():
    config = find("olmoe_7b_pretrain_config").build()
    config.validate(8)
    model = toy.shrink(config, 8, 1).config.model
    assert model.kv_channels * model.num_attention_heads == model.hidden_size


@pytest.mark.parametrize(("layout", "expected"), LAYOUTS)
def test_layouts_keep_their_dimensions(layout, expected):
    small = toy.smaller(layout)
    assert small == expected
    assert small.ranks <= toy.MOST_RANKS
    assert small.is_possible


RECIPES = [
    "llama31_405b_pretrain_config",
    "gemma2_27b_pretrain_config",
    "gemma3_12b_pretrain_config",
    "qwen3_235b_a22b_pretrain_config",
    "deepseek_v2_lite_pretrain_config",
    "deepseek_v3_pretrain_config",
    "gpt_oss_20b_finetune_config",
    "glm45_355b_pretrain_config",
    "smollm2_135m_pretrain_config",
    "llama3_8b_fp8_pretrain_config",
    "nemotron4_340b_pretrain_config",
]


@pytest.mark.parametrize("name", RECIPES)
def test_toys_keep_what_the_recipe_has(name):
    recipe = find(name)
    config = recipe.build()
    config.validate(recipe.gpus)
    small = toy.shrink(config, recipe.gpus, steps=2)
    small.config.validate(small.layout.ranks)
    assert ranks.parameter_count(small.config.model) < 1_000_000
    assert recipe.build().model.num_layers == config.model.num_layers, "the real config is left as it is"
    before, after = config.model, small.config.model
    for key in ("tensor_model", "pipeline_model", "context", "expert_model"):
        was, size = (getattr(model, f"{key}_parallel_size") for model in (before, after))
        said = any(key.partition("_")[0] in change for change in small.changes)
        assert (size > 1) == (was > 1) or said
        assert size == was or said
    assert bool(before.num_moe_experts) == bool(after.num_moe_experts)
    assert bool(before.mtp_num_layers) == bool(after.mtp_num_layers)
    assert set(kinds(before)) == set(kinds(after)), "a kind of layer was lost"
    assert AutoBridge.hf_config_of(after)["num_hidden_layers"] == after.num_layers


def kinds(model):
    return toy._kinds(model)


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [("AAAA", 2, [0, 1]), ("AAAB", 2, [0, 3]), ("ABC", 6, [0, 0, 1, 1, 2, 2]), ("M-M*", 4, [0, 1, 2, 3])],
)
def test_layers_are_sampled(layers, count, expected):
    assert toy.sample(layers, count) == expected
