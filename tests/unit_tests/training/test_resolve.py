# SPDX-License-Identifier: Apache-2.0
"""Open values are derived, set ones stay, contradictions are told."""

import copy

import pytest
import torch

from megatron.bridge.backends import device, layer_specs
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    MixedPrecisionConfig,
    OptimizerConfig,
    SchedulerConfig,
)
from megatron.bridge.training.mixed_precision import RECIPES, get_mixed_precision_config
from megatron.bridge.utils.errors import UserError
from tests.toy_run import toy_config


@pytest.mark.parametrize(
    ("name", "dtype", "fp32_reduction"),
    [("fp32", torch.float32, True), ("bf16_mixed", torch.bfloat16, True), ("fp16_mixed", torch.float16, False)],
)
def test_precision_reaches_model_optimizer_and_reduction(name, dtype, fp32_reduction):
    config = toy_config(mixed_precision=name)
    config.validate(1)
    assert config.optimizer.params_dtype == dtype
    assert (config.model.bf16, config.model.fp16) == (dtype == torch.bfloat16, dtype == torch.float16)
    assert config.ddp.grad_reduce_in_fp32 is fp32_reduction
    assert config.model.resolved().params_dtype == dtype


def test_without_a_recipe_the_model_decides():
    config = toy_config(model={"bf16": True}, mixed_precision=None)
    assert config.validate(1) == []
    assert config.optimizer.bf16 is True


def test_recipe_that_takes_the_place_of_the_models_precision_is_told():
    config = toy_config(model={"bf16": True}, mixed_precision="fp32")
    assert config.validate(1) == ["model.bf16=True gives way to mixed_precision, which asks for False"]
    assert config.model.resolved().params_dtype == torch.float32


def test_reduction_that_was_set_wins_over_the_recipe_and_is_told():
    config = toy_config(mixed_precision="bf16_mixed", ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=False))
    assert "ddp.grad_reduce_in_fp32=False is used" in config.validate(1)[0]
    assert config.ddp.grad_reduce_in_fp32 is False


def test_contradicting_precisions_are_refused():
    config = toy_config(mixed_precision="bf16_mixed", optimizer=OptimizerConfig(lr=1e-3, fp16=True))
    with pytest.raises(UserError, match=r"optimizer.fp16=True contradicts mixed_precision"):
        config.validate(1)
    config = toy_config(mixed_precision=MixedPrecisionConfig(bf16=True, params_dtype=torch.float16))
    with pytest.raises(UserError, match=r"mixed_precision.params_dtype=torch.float16 contradicts"):
        config.validate(1)
    config = toy_config(model={"params_dtype": torch.float16}, mixed_precision="bf16_mixed")
    with pytest.raises(UserError, match=r"model.params_dtype=torch.float16 contradicts mixed_precision"):
        config.validate(1)


QUANTISED = [name for name, recipe in RECIPES.items() if recipe().scaling]


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize(
    ("engine", "capability", "lacks"),
    [
        (False, (10, 0), "Transformer Engine, which is not installed"),
        (True, (8, 0), r"a GPU of compute capability (8\.9|9\.0|10\.0), and here is 8\.0"),
        (True, None, r"a GPU of compute capability (8\.9|9\.0|10\.0), and here is none"),
        (True, (10, 0), None),
    ],
)
def test_a_run_that_needs_other_hardware_is_refused_by_name(name, engine, capability, lacks, monkeypatch):
    monkeypatch.setattr(layer_specs, "has_transformer_engine", lambda: engine)
    monkeypatch.setattr(device, "has_cuda", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    config = toy_config(mixed_precision=name)
    if lacks is None:
        config.validate()
        return
    with pytest.raises(UserError, match=f"mixed_precision={name} needs {lacks}: use bf16_mixed"):
        config.validate()


@pytest.mark.parametrize("name", QUANTISED)
def test_another_machine_may_have_what_this_one_lacks(name):
    config = toy_config(mixed_precision=name)
    (note,) = config.validate(1)
    assert note.startswith(f"mixed_precision={name} needs Transformer Engine")
    model = config.model
    assert (model.fp8_recipe if model.fp8 else model.fp4_recipe) == RECIPES[name]().scaling
    assert config.optimizer.fp8_recipe == (model.fp8_recipe if model.fp8 else None)
    assert config.validate(1) == [note]


def test_model_that_quantises_by_itself_is_told_the_same():
    model = {"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise"}
    with pytest.raises(UserError, match="mixed_precision=tensorwise needs Transformer Engine"):
        toy_config(model=model, mixed_precision=None).validate()
    config = toy_config(model={"bf16": True, "fp8": "hybrid"}, mixed_precision="bf16_mixed")
    assert config.validate(1) == ["model.fp8=hybrid gives way to mixed_precision, which asks for None"]


def test_unknown_precision_names_the_nearest():
    with pytest.raises(UserError, match="did you mean bf16_mixed"):
        get_mixed_precision_config("bf16_mxed")


@pytest.mark.parametrize(
    ("world_size", "model", "sharded"),
    [
        (1, {}, False),
        (2, {}, True),
        (2, {"tensor_model_parallel_size": 2}, False),
        (2, {"context_parallel_size": 2}, True),
    ],
)
def test_optimizer_is_sharded_where_there_are_replicas(world_size, model, sharded):
    config = toy_config(model=model)
    config.validate(world_size)
    assert config.ddp.use_distributed_optimizer is sharded
    assert config.optimizer.use_distributed_optimizer is sharded


def test_sharding_that_was_set_stays():
    config = toy_config(optimizer=OptimizerConfig(lr=1e-3, use_distributed_optimizer=True))
    config.validate(1)
    assert config.ddp.use_distributed_optimizer is True
    config = toy_config(
        optimizer=OptimizerConfig(lr=1e-3, use_distributed_optimizer=True),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=False),
    )
    with pytest.raises(UserError, match=r"use_distributed_optimizer=True contradicts"):
        config.validate(1)


def test_two_interleaved_stages_overlap_their_messages():
    """Batched, they arrive in the wrong order without an error."""
    layout = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    config = toy_config(model=layout)
    (note,) = config.validate(2)
    assert "overlap_p2p_comm=True" in note
    assert (config.model.overlap_p2p_comm, config.model.batch_p2p_comm) == (True, False)
    assert config.validate(2) == []


def test_schedule_and_folder_follow_the_run():
    config = toy_config(checkpoint=CheckpointConfig(save="somewhere"))
    config.validate(1)
    assert config.scheduler.lr_decay_iters == config.train.train_iters
    assert config.scheduler.end_weight_decay == config.optimizer.weight_decay
    assert config.optimizer.min_lr == 0.0
    assert config.logger.log_dir == "somewhere"
    config = toy_config(scheduler=SchedulerConfig(lr_decay_iters=7, end_weight_decay=0.1))
    config.validate(1)
    assert config.scheduler.lr_decay_iters == 7


def test_trial_shorter_than_the_warmup_is_told():
    config = toy_config(scheduler=SchedulerConfig(lr_warmup_iters=500))
    assert "ends within scheduler.lr_warmup_iters=500" in config.validate(1)[0]
    assert config.scheduler.lr_decay_iters == 501


def test_validation_twice_changes_nothing():
    config = toy_config(mixed_precision="bf16_mixed")
    config.validate(2)
    before = config.to_yaml()
    config.validate(2)
    assert config.to_yaml() == before


def test_yaml_round_trip_is_exact(capfd):
    config = toy_config(mixed_precision="bf16_mixed")
    config.validate(2)
    again = ConfigContainer.from_yaml(config.to_yaml())
    assert again == config
    assert again.to_yaml() == config.to_yaml()
    config.print_yaml()
    assert capfd.readouterr().err.strip() == config.to_yaml().strip()


def test_yaml_of_something_else_is_refused():
    with pytest.raises(UserError, match="not a ConfigContainer"):
        ConfigContainer.from_yaml("a: 1")


def test_what_megatron_core_refuses_is_a_user_error():
    config = toy_config(model={"recompute_granularity": "full"})
    with pytest.raises(UserError, match="model: "):
        config.validate(1)


def test_parts_that_only_transformer_engine_computes_again_are_refused_here():
    config = toy_config(
        model={"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm"]}
    )
    [note] = [note for note in copy.deepcopy(config).validate(1) if "recompute" in note]
    assert note.startswith("model.recompute_modules=layernorm needs Transformer Engine")
    with pytest.raises(UserError, match="take core_attn, mlp, moe, shared_experts instead"):
        config.validate()
    config.model.recompute_modules = ["core_attn", "mlp"]
    config.validate()
