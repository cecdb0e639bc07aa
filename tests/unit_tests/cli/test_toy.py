# SPDX-License-Identifier: Apache-2.0
"""What a rehearsal shrinks, and what it keeps."""

from pathlib import Path

import pytest
import torch
import transformers

from megatron.bridge.autotune import meta_model
from megatron.bridge.autotune.predict import predict
from megatron.bridge.cli.rehearse import command, toy_config
from megatron.bridge.cli.rehearse.toy_config import ParallelDimensions
from megatron.bridge.cli.support.train_job import TrainJob
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.models.conversion.check import compare_logits
from megatron.bridge.recipes.catalog import find
from megatron.bridge.recipes.sizes import hf_config
from megatron.bridge.utils.config.origins import Origins
from tests.families import published
from tests.families.own_models import model_class
from tests.families.rows import ONE_FOR_EACH
from tests.workers import leave

LAYOUTS = [
    (ParallelDimensions(2, 2, 1, 2, 1, 2), ParallelDimensions(2, 2, 1, 2, 1, 2)),  # small enough
    (ParallelDimensions(8, 4, 1, 16, 1, 8), ParallelDimensions(2, 2, 1, 2, 1, 2)),
    (
        ParallelDimensions(8, 8, 4, 4, 1, 8),
        ParallelDimensions(2, 2, 2, 1, 1, 2),
    ),  # no room for replicas
    (
        ParallelDimensions(1, 16, 1, 64, 64, 1),
        ParallelDimensions(1, 2, 1, 2, 2, 1),
    ),  # experts over replicas
    (ParallelDimensions(4, 8, 1, 8, 8, 1), ParallelDimensions(2, 2, 1, 2, 2, 1)),
    (
        ParallelDimensions(4, 1, 1, 16, 8, 4),
        ParallelDimensions(2, 1, 1, 2, 2, 2),
    ),  # experts are cut, too
]


@pytest.mark.parametrize("size", ["49b", "253b"])
def test_layers_that_are_described_one_by_one_keep_their_kinds(size):
    recipe = find(f"llama_nemotron_{size}_pretrain_config")
    config = recipe()
    config = config.resolve(recipe.gpus).config
    small = toy_config.shrink(config, recipe.gpus, steps=1)
    small.config.validate(small.dimensions.ranks)
    before, after = (model.per_block_parameters for model in (config.model, small.config.model))
    assert {block.attention.num_query_groups for block in before} == {None, 8}
    assert {block.attention.num_query_groups for block in after} == {None, 4}
    kinds = [
        {(block["attention"]["no_op"], block["ffn"]["ffn_mult"]) for block in model.block_configs}
        for model in (config.model, small.config.model)
    ]
    assert kinds[0] == kinds[1]
    assert len(kinds[1]) <= small.config.model.num_layers <= len(kinds[1]) + 1
    assert meta_model.parameter_count(small.config.model) < 7_000_000
    assert (
        AutoBridge.hf_config_of(small.config.model)["block_configs"]
        == small.config.model.block_configs
    )


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("ibm-granite--granite-4.0-h-tiny", "mamba_layers"),
        ("LiquidAI--LFM2-8B-A1B", "short_conv_layers"),
    ],
)
def test_layers_without_attention_stay_beside_those_with_it(tmp_path, name, field):
    (tmp_path / "config.json").write_text(
        (Path(published.__path__[0]) / f"{name}.json").read_text()
    )
    config = find("olmoe_7b_pretrain_config")()
    config.model = AutoBridge.from_hf_pretrained(tmp_path).to_megatron_provider(load_weights=False)
    config.model.pipeline_model_parallel_size, config.model.tensor_model_parallel_size = 2, 4
    config.model.sequence_parallel = True
    config.model.seq_length = config.dataset.seq_length
    small = toy_config.shrink(config.resolve(8).config, 8, 1)
    small.config.validate(small.dimensions.ranks)
    assert set(getattr(small.config.model, field)) == {0, 1}
    assert meta_model.parameter_count(small.config.model) < 7_000_000
    assert (
        AutoBridge.hf_config_of(small.config.model)["architectures"]
        == AutoBridge.hf_config_of(config.model)["architectures"]
    )


def test_layers_of_no_operations_have_a_time_under_selective_recomputation():
    """Architecture search took attention and MLP from them."""
    config = find("llama_nemotron_253b_finetune_config")().resolve(144).config
    small = toy_config.shrink(config, 144, steps=1)
    small.config.model.recompute_granularity = "selective"
    assert predict(small.config, small.dimensions.ranks, "H100 80GB").seconds > 0


def test_a_toy_to_tune_predicts_one_token():
    """Transformers makes it."""
    recipe = find("deepseek_v3_finetune_config")
    config = recipe()
    job = TrainJob(config, Origins.of(config), recipe.name, "sft", recipe.gpus, recipe)
    small = command._toy_of(job, recipe.gpus, 1)
    assert small.config.model.mtp_num_layers is None
    assert AutoBridge.hf_config_of(small.config.model)["num_nextn_predict_layers"] == 0
    assert any("predicts one token" in change for change in small.changes)


def test_heads_that_are_normed_together_are_as_wide_as_the_model():
    config = find("olmoe_7b_pretrain_config")()
    config = config.resolve(8).config
    model = toy_config.shrink(config, 8, 1).config.model
    assert model.kv_channels * model.num_attention_heads == model.hidden_size


@pytest.mark.sampled
@pytest.mark.parametrize(
    "model", sorted(model for model in ONE_FOR_EACH if hasattr(transformers, model))
)
def test_a_toy_of_every_architecture_computes_what_transformers_does(model, tmp_path):
    leave()  # an earlier test in this process may have left its group
    row = ONE_FOR_EACH[model]
    kind = model_class(row.model)
    config = find("llama32_1b_pretrain_config")()
    source = kind.config_class(**row.config, architectures=[kind.__name__])
    config.model = AutoBridge.from_hf_config(source).to_megatron_provider(load_weights=False)
    config.model.seq_length = config.dataset.seq_length = 64
    config.mixed_precision = "fp32"
    toy = toy_config.shrink(config.resolve(1).config, 1, 1).config.model
    values = command._without_out_of_range_tokens(AutoBridge.hf_config_of(toy))
    hf = kind(hf_config(values)).float().eval()
    hf.save_pretrained(tmp_path)
    ours = AutoBridge.from_hf_pretrained(tmp_path).to_megatron_model(wrap_with_ddp=False)
    ids = torch.randint(
        0, values["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(1)
    )
    report = compare_logits.compare(
        compare_logits.run_hf(hf, ids), compare_logits.run_megatron(ours, ids)
    )
    assert report.largest <= 1e-3 * report.scale


@pytest.mark.parametrize(("layout", "expected"), LAYOUTS)
def test_layouts_keep_their_dimensions(layout, expected):
    small = toy_config.shrink_dimensions(layout)
    assert small == expected
    assert small.ranks <= toy_config.MOST_RANKS
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
    config = recipe()
    config = config.resolve(recipe.gpus).config
    small = toy_config.shrink(config, recipe.gpus, steps=2)
    small.config.validate(small.dimensions.ranks)
    assert meta_model.parameter_count(small.config.model) < 1_100_000
    assert recipe().model.num_layers == config.model.num_layers, "the real config is left as it is"
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
    return toy_config._layer_kinds(model)


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [
        ("AAAA", 2, [0, 1]),
        ("AAAB", 2, [0, 3]),
        ("ABC", 6, [0, 0, 1, 1, 2, 2]),
        ("M-M*", 4, [0, 1, 2, 3]),
    ],
)
def test_layers_are_sampled(layers, count, expected):
    assert toy_config.sample_layers(layers, count) == expected
