# SPDX-License-Identifier: Apache-2.0
"""Open values are derived, set ones stay, contradictions are told."""

from dataclasses import is_dataclass

import pytest
import torch
from megatron.core.transformer.moe import fused_a2a

from megatron.bridge.autotune.memory import memory_per_rank
from megatron.bridge.backends.cpu import device
from megatron.bridge.backends.specs import layer_specs
from megatron.bridge.cli.main import main
from megatron.bridge.training.config import (
    CheckpointConfig,
    CommOverlapConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    MixedPrecisionConfig,
    OptimizerConfig,
    SchedulerConfig,
)
from megatron.bridge.training.config.blocks.mixed_precision import (
    RECIPES,
    get_mixed_precision_config,
)
from megatron.bridge.utils.errors import UserError
from tests.toy_run import toy_config


@pytest.mark.parametrize(
    ("name", "dtype", "fp32_reduction"),
    [
        ("fp32", torch.float32, True),
        ("bf16_mixed", torch.bfloat16, True),
        ("fp16_mixed", torch.float16, False),
    ],
)
def test_precision_reaches_model_optimizer_and_reduction(name, dtype, fp32_reduction):
    config = toy_config(mixed_precision=name).resolve(1).config
    assert config.optimizer.params_dtype == dtype
    assert (config.model.bf16, config.model.fp16) == (
        dtype == torch.bfloat16,
        dtype == torch.float16,
    )
    assert config.ddp.grad_reduce_in_fp32 is fp32_reduction
    assert config.model.resolved().params_dtype == dtype


def test_without_a_recipe_the_model_decides():
    config = toy_config(model={"bf16": True}, mixed_precision=None)
    resolved = config.resolve(1)
    assert (resolved.notes, resolved.config.optimizer.bf16) == ([], True)


def test_recipe_that_takes_the_place_of_the_models_precision_is_told():
    config = toy_config(model={"bf16": True}, mixed_precision="fp32")
    resolved = config.resolve(1)
    assert resolved.notes == ["model.bf16=True is overridden by mixed_precision, which sets False"]
    assert resolved.config.model.resolved().params_dtype == torch.float32
    assert config.model.bf16 is True  # what the user wrote stays


def test_reduction_that_was_set_wins_over_the_recipe_and_is_told():
    config = toy_config(
        mixed_precision="bf16_mixed", ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=False)
    )
    resolved = config.resolve(1)
    assert "ddp.grad_reduce_in_fp32=False is used" in resolved.notes[0]
    assert resolved.config.ddp.grad_reduce_in_fp32 is False


def test_contradicting_precisions_are_refused():
    config = toy_config(mixed_precision="bf16_mixed", optimizer=OptimizerConfig(lr=1e-3, fp16=True))
    with pytest.raises(UserError, match=r"optimizer.fp16=True contradicts mixed_precision"):
        config.validate(1)
    config = toy_config(mixed_precision=MixedPrecisionConfig(bf16=True, params_dtype=torch.float16))
    with pytest.raises(UserError, match=r"mixed_precision.params_dtype=torch.float16 contradicts"):
        config.validate(1)
    config = toy_config(model={"params_dtype": torch.float16}, mixed_precision="bf16_mixed")
    with pytest.raises(
        UserError, match=r"model.params_dtype=torch.float16 contradicts mixed_precision"
    ):
        config.validate(1)


QUANTISED = [name for name, recipe in RECIPES.items() if recipe().scaling]


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize(
    ("engine", "capability", "lacks"),
    [
        (False, (10, 0), "Transformer Engine, which is not installed"),
        (True, (8, 0), r"a GPU of compute capability (8\.9|9\.0|10\.0), .* 8\.0"),
        (True, None, r"a GPU of compute capability (8\.9|9\.0|10\.0), .* none"),
        (True, (10, 0), None),
    ],
)
def test_a_run_that_needs_other_hardware_is_refused_by_name(
    name, engine, capability, lacks, monkeypatch
):
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
    resolved = config.resolve(1)
    (note,) = resolved.notes
    assert note.startswith(f"mixed_precision={name} needs Transformer Engine")
    model = resolved.config.model
    assert (model.fp8_recipe if model.fp8 else model.fp4_recipe) == RECIPES[name]().scaling
    assert resolved.config.optimizer.fp8_recipe == (model.fp8_recipe if model.fp8 else None)
    assert resolved.config.validate(1) == [note]


def test_weights_in_fp8_are_checked_on_another_machine():
    config = toy_config(model={"fp8_param": True}, mixed_precision="bf16_with_mxfp8_mixed")
    assert config.resolve(1).config.model.fp8_param


def test_model_that_quantises_by_itself_is_told_the_same():
    model = {"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise"}
    with pytest.raises(UserError, match="mixed_precision=tensorwise needs Transformer Engine"):
        toy_config(model=model, mixed_precision=None).validate()
    config = toy_config(model={"bf16": True, "fp8": "hybrid"}, mixed_precision="bf16_mixed")
    assert config.validate(1) == [
        "model.fp8=hybrid is overridden by mixed_precision, which sets None"
    ]


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
    config = toy_config(model=model).resolve(world_size).config
    assert config.ddp.use_distributed_optimizer is sharded
    assert config.optimizer.use_distributed_optimizer is sharded


def test_sharding_that_was_set_stays():
    config = (
        toy_config(optimizer=OptimizerConfig(lr=1e-3, use_distributed_optimizer=True))
        .resolve(1)
        .config
    )
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
    resolved = config.resolve(2)
    (note,) = resolved.notes
    assert "overlap_p2p_comm=True" in note
    assert (resolved.config.model.overlap_p2p_comm, resolved.config.model.batch_p2p_comm) == (
        True,
        False,
    )
    assert resolved.config.validate(2) == []


def test_schedule_and_folder_follow_the_run():
    config = toy_config(checkpoint=CheckpointConfig(save="somewhere")).resolve(1).config
    assert config.scheduler.lr_decay_iters == config.train.train_iters
    assert config.scheduler.end_weight_decay == config.optimizer.weight_decay
    assert config.optimizer.min_lr == 0.0
    assert config.logger.log_dir == "somewhere"
    config = (
        toy_config(scheduler=SchedulerConfig(lr_decay_iters=700, end_weight_decay=0.1))
        .resolve(1)
        .config
    )
    assert config.scheduler.lr_decay_iters == 700


def test_trial_shorter_than_the_warmup_is_told():
    config = toy_config(scheduler=SchedulerConfig(lr_warmup_iters=500))
    resolved = config.resolve(1)
    assert "ends within scheduler.lr_warmup_iters=500" in resolved.notes[0]
    assert resolved.config.scheduler.lr_decay_iters == 501


def test_resolving_changes_nothing_that_the_user_wrote():
    config = toy_config(
        model={
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "vocab_size": None,
        },
        mixed_precision="bf16_mixed",
        comm_overlap=CommOverlapConfig(),
        checkpoint=CheckpointConfig(save="somewhere"),
    )
    before, blocks = config.to_yaml(), dict(vars(config))
    resolved = config.resolve(4).config
    assert config.to_yaml() == before != resolved.to_yaml()
    assert all(getattr(config, name) is block for name, block in blocks.items())
    assert all(
        getattr(resolved, name) is not block
        for name, block in blocks.items()
        if is_dataclass(block)
    )


def test_hooks_of_the_copy_are_not_the_users():
    config = toy_config()
    config.model.register_pre_wrap_hook(lambda chunks: chunks)
    resolved = config.resolve(1).config
    resolved.model.register_pre_wrap_hook(lambda chunks: chunks)
    assert (len(config.model._pre_wrap_hooks), len(resolved.model._pre_wrap_hooks)) == (1, 2)


def test_resolving_what_is_resolved_changes_nothing():
    config = toy_config(mixed_precision="bf16_mixed").resolve(2).config
    assert config.resolve(2).config.to_yaml() == config.to_yaml()


def test_yaml_round_trip_is_exact(capfd):
    config = toy_config(mixed_precision="bf16_mixed").resolve(2).config
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
        model={
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn", "layernorm"],
        }
    )
    [note] = [note for note in config.validate(1) if "recompute" in note]
    assert note.startswith("model.recompute_modules=layernorm needs Transformer Engine")
    with pytest.raises(UserError, match="core_attn, mlp, moe, shared_experts"):
        config.validate()
    config.model.recompute_modules = ["core_attn", "mlp"]
    config.validate()


EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 16, "moe_token_dispatcher_type": "flex"}


@pytest.mark.parametrize(
    ("backend", "flag"), [("deepep", "HAVE_DEEP_EP"), ("hybridep", "HAVE_HYBRIDEP")]
)
def test_a_dispatcher_needs_its_package_and_a_gpu(backend, flag, monkeypatch):
    """Megatron-Core asserts that it is there, in the middle of a build."""
    config = toy_config(model={**EXPERTS, "moe_flex_dispatcher_backend": backend})
    [note] = [note for note in config.validate(2) if "flex" in note]
    assert f"moe_flex_dispatcher_backend={backend} needs a GPU and the package deep_ep" in note
    with pytest.raises(UserError, match="use alltoall"):
        config.validate()
    monkeypatch.setattr(fused_a2a, flag, True)
    with pytest.raises(UserError, match="needs a GPU"):
        config.validate()


def test_a_plan_of_a_run_with_the_flex_dispatcher_has_its_memory():
    config = toy_config(model={**EXPERTS, "expert_model_parallel_size": 2})
    usual = toy_config(
        model={**EXPERTS, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
    )
    found, expected = (memory_per_rank(each.resolve(2).config, 2) for each in (config, usual))
    assert found == expected


def test_nccls_buffers_need_a_gpu():
    config = toy_config(ddp=DistributedDataParallelConfig(nccl_ub=True))
    with pytest.raises(UserError, match=r"ddp\.nccl_ub=True needs NCCL.*switch it off"):
        config.validate()


def test_a_dry_run_resolves_its_config_once(resolutions, capfd):
    assert main(["train", "--recipe", "llama32_1b_pretrain_config", "--dry-run"]) == 0
    assert len(resolutions) == 1
    capfd.readouterr()
