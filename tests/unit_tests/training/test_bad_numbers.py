# SPDX-License-Identifier: Apache-2.0
"""Numbers that break a model, an adapter or an optimizer are refused by their key, wherever they stand."""

import math

import pytest

from megatron.bridge.models import GPTModelProvider
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.config import ParameterOverride
from megatron.bridge.training.config.resolve.usual_ranges import unusual_numbers
from tests.refusals import refused, says
from tests.toy_run import toy_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("block", "name"),
    [
        ("model", "layernorm_epsilon"),
        ("model", "init_method_std"),
        ("optimizer", "lr"),
        ("optimizer", "adam_eps"),
        ("scheduler", "start_weight_decay"),
        ("peft", "alpha"),
    ],
)
def test_a_number_that_is_not_finite_is_refused(block, name, value):
    config = toy_config(peft=LoRA())
    setattr(getattr(config, block), name, value)
    with refused(f"{block}.{name}={value}: must be a finite number"):
        config.validate(1)


def test_numbers_in_lists_and_mappings_must_be_finite_too():
    config = toy_config(peft=LoRA(alpha_by_module={"linear_qkv": math.nan}))
    config.optimizer.overrides = [ParameterOverride(params=["*"], lr_mult=math.inf)]
    config.model.rope_parameters = {**LONG, "long_factor": [2.0, math.nan]}
    with refused(
        "model.rope_parameters.long_factor[1]=nan",
        "optimizer.overrides[0].lr_mult=inf",
        "peft.alpha_by_module.linear_qkv=nan",
        "must be a finite number",
    ):
        config.validate(1)


def test_an_infinite_default_is_legal():
    config = toy_config()
    config.optimizer.grad_norm_skip_threshold = math.inf
    config.validate(1)


@pytest.mark.parametrize("value", [0, math.nan, "x", True, -1.0])
@pytest.mark.parametrize(
    ("parameters", "key"),
    [
        *((LLAMA3, key) for key in LLAMA3 if key != "rope_type"),
        *((YARN, key) for key in ("factor", "original_max_position_embeddings")),
        *((YARN, key) for key in ("attention_factor", "beta_fast", "rope_theta")),
        (LONG, "original_max_position_embeddings"),
    ],
)
@pytest.mark.parametrize("name", ["rope_parameters", "local_rope_parameters"])
def test_numbers_of_a_scaled_rotary_embedding_are_above_zero(parameters, key, value, name):
    changed = {name: {**parameters, key: value}}
    provider = GPTModelProvider(num_layers=2, hidden_size=32, num_attention_heads=4, **changed)
    with refused(f"{name}.{key}={value!r}", "must be a"):
        provider.resolved()


def test_a_list_of_factors_has_only_numbers_above_zero():
    provider = GPTModelProvider(num_layers=2, hidden_size=32, num_attention_heads=4)
    provider.rope_parameters = {**LONG, "short_factor": [1.0, 1.0, 0.0, 1.0]}
    with refused("rope_parameters.short_factor=[1.0, 1.0, 0.0, 1.0]", "above 0"):
        provider.resolved()


def test_a_mscale_of_zero_is_none():
    provider = GPTModelProvider(num_layers=2, hidden_size=32, num_attention_heads=4)
    provider.rope_parameters = {**YARN, "mscale": 0, "mscale_all_dim": 0.0}
    provider.resolved()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layernorm_epsilon": math.nan}, "layernorm_epsilon=nan: must be a finite number"),
        ({"init_method_std": math.inf}, "init_method_std=inf: must be a finite number"),
        ({"num_moe_experts": 0}, "num_moe_experts=0: must be at least 1"),
        ({"hidden_dropout": 1.0}, "hidden_dropout=1.0: must lie in [0, 1)"),
        ({"rotary_base": 0.0}, "rotary_base=0.0: must be above 0"),
    ],
)
def test_a_provider_refuses_them_without_a_run(changes, sentence):
    provider = GPTModelProvider(num_layers=2, hidden_size=32, num_attention_heads=4, **changes)
    with refused(sentence):
        provider.finalize()


@pytest.mark.parametrize("experts", [0, -1])
def test_a_model_has_at_least_one_expert_or_none_at_all(experts):
    with refused(f"model.num_moe_experts={experts}: must be at least 1", "or null without experts"):
        toy_config({"num_moe_experts": experts}).validate(1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"alpha": math.nan}, "peft.alpha=nan: must be a finite number above 0"),
        ({"alpha": 0.0}, "peft.alpha=0.0: must be a finite number above 0"),
        ({"alpha_by_module": {"*": -1.0}}, "peft.alpha_by_module['*']=-1.0: must be a finite"),
        ({"dim": 2.5}, "peft.dim=2.5: a rank is at least 1, a whole number"),
        ({"dropout": math.nan}, "peft.dropout=nan: a probability is at least 0 and below 1"),
    ],
)
def test_an_adapter_refuses_them_without_a_run(changes, sentence):
    [problem] = LoRA(**changes).problems()
    assert says(problem, sentence)


def test_an_adapter_that_is_switched_off_can_be_loaded():
    assert not LoRA(alpha=0.0).problems(training=False)
    assert LoRA(alpha=math.inf).problems(training=False)


@pytest.mark.parametrize(
    ("block", "name", "value", "key"),
    [
        ("optimizer", "lr", 5.0, "optimizer.lr"),
        ("optimizer", "decoupled_lr", 5.0, "optimizer.decoupled_lr"),
        ("model", "init_method_std", 0.0, "model.init_method_std"),
        ("model", "embedding_init_method_std", 0.0, "model.embedding_init_method_std"),
    ],
)
def test_a_number_that_ruins_a_run_is_noted(block, name, value, key):
    config = toy_config()
    setattr(getattr(config, block), name, value)
    [note] = unusual_numbers(config)
    assert says(note, f"{key}={value} is unusual")


def test_the_learning_rates_of_some_parameters_are_noted():
    config = toy_config()
    config.optimizer.lr = 1e-3
    config.optimizer.overrides = [
        ParameterOverride(params=["a"], lr=5.0),
        ParameterOverride(params=["b"], lr_mult=1e4),
        ParameterOverride(params=["c"], lr_mult=2.0),
        ParameterOverride(params=["d"], lr=0.0, min_lr=0.0),
        ParameterOverride(params=["e"], weight_decay=0.0),
    ]
    notes = list(unusual_numbers(config))
    assert [note.partition(" ")[0] for note in notes] == [
        "optimizer.overrides[0].lr=5.0",
        "optimizer.overrides[1].lr=10.0",
    ]
