# SPDX-License-Identifier: Apache-2.0
"""What overlaps follows from the layout, is shown as derived, and never goes against what somebody set."""

import pytest

from megatron.bridge.backends.hardware import user_buffers
from megatron.bridge.backends.specs import layer_specs
from megatron.bridge.training.config import (
    CommOverlapConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
)
from megatron.bridge.utils import distributed
from megatron.bridge.utils.config.origins import Origins
from megatron.bridge.utils.errors import UserError
from tests.toy_run import toy_config

PP2, VP2 = {"pipeline_model_parallel_size": 2}, {"virtual_pipeline_model_parallel_size": 2}
OFF = {"overlap_p2p_comm", "overlap_grad_reduce", "overlap_param_gather", "align_param_gather"}


def resolved(world_size, block=None, model=None, **blocks):
    config = toy_config(model=model, comm_overlap=block or CommOverlapConfig(), **blocks)
    return config.resolve(world_size).config


def switched_on(config):
    """The switches that are on, each where it is read."""
    owners = (config.model, config.ddp)
    return {name for name in OFF for owner in owners if getattr(owner, name, False)}


@pytest.mark.parametrize(
    ("world_size", "model", "ddp", "on"),
    [
        (1, {}, {}, set()),
        (2, {}, {}, {"overlap_grad_reduce", "overlap_param_gather"}),
        (2, {"context_parallel_size": 2}, {}, {"overlap_grad_reduce", "overlap_param_gather"}),
        (2, {"tensor_model_parallel_size": 2}, {}, set()),
        (2, {}, {"use_distributed_optimizer": False}, {"overlap_grad_reduce"}),
        (2, PP2, {}, set()),
        (2, PP2 | VP2, {}, {"overlap_p2p_comm"}),
        (4, PP2 | VP2, {}, OFF),
    ],
)
def test_overlap_follows_from_the_layout(world_size, model, ddp, on):
    config = resolved(world_size, model=model, ddp=DistributedDataParallelConfig(**ddp))
    assert switched_on(config) == on
    assert config.model.batch_p2p_comm is ("overlap_p2p_comm" not in on)
    assert config.optimizer.overlap_param_gather is ("overlap_param_gather" in on)
    assert {name for name in OFF if getattr(config.comm_overlap, name)} == on
    before = config.to_yaml()
    assert config.validate(world_size) == []
    assert config.to_yaml() == before
    assert ConfigContainer.from_yaml(before) == config


@pytest.mark.parametrize(
    ("block", "on"),
    [
        ({"overlap_grad_reduce": False}, {"overlap_p2p_comm"}),
        ({"overlap_param_gather": False}, {"overlap_p2p_comm", "overlap_grad_reduce"}),
        ({"align_param_gather": False}, OFF - {"align_param_gather"}),
    ],
)
def test_what_is_switched_off_takes_what_needs_it_along(block, on):
    assert switched_on(resolved(4, CommOverlapConfig(**block), PP2 | VP2)) == on


def test_a_fully_sharded_model_has_no_buffers_to_overlap():
    assert switched_on(resolved(2, dist=DistributedInitConfig(use_torch_fsdp2=True))) == set()


def test_megatron_fsdp_overlaps_with_and_without_the_block():
    config = toy_config(ddp=DistributedDataParallelConfig(use_megatron_fsdp=True))
    config = config.resolve(2).config
    both = {"overlap_grad_reduce", "overlap_param_gather"}
    assert switched_on(config) == switched_on(resolved(2, ddp=config.ddp)) == both


def test_without_the_block_nothing_is_derived():
    config = toy_config()
    config = config.resolve(2).config
    assert switched_on(config) == set()


def test_a_switch_of_the_owner_stays_and_a_contradiction_is_told():
    config = resolved(1, ddp=DistributedDataParallelConfig(overlap_grad_reduce=True))
    assert config.comm_overlap.overlap_grad_reduce is True
    with pytest.raises(UserError, match=r"comm_overlap.overlap_grad_reduce=False contradicts ddp"):
        resolved(
            2,
            CommOverlapConfig(overlap_grad_reduce=False),
            ddp=DistributedDataParallelConfig(overlap_grad_reduce=True),
        )


def test_values_of_the_block_reach_their_owners():
    config = resolved(2, CommOverlapConfig(bucket_size=12345))
    assert config.ddp.bucket_size == 12345
    with pytest.raises(
        UserError, match=r"ddp.overlap_param_gather=True needs ddp.overlap_grad_reduce=True"
    ):
        resolved(2, CommOverlapConfig(overlap_grad_reduce=False, overlap_param_gather=True))


def test_derived_values_say_so():
    config = toy_config(comm_overlap=CommOverlapConfig(overlap_param_gather=False))
    origins = config.resolve(origins=Origins.of(config, "recipe")).origins
    assert origins.get("comm_overlap.overlap_grad_reduce") == "derived"
    assert origins.get("comm_overlap.overlap_param_gather") == "recipe"


ENGINE = {
    "tp_comm_overlap": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "fine_grained_activation_offloading": {"offload_modules": ["core_attn"]},
}


@pytest.mark.parametrize("name", ENGINE)
def test_what_needs_transformer_engine_is_refused_here_and_noted_for_elsewhere(name, monkeypatch):
    model = {name: True, **ENGINE[name]}
    size = model.get("tensor_model_parallel_size", 1)
    (note,) = toy_config(model=model).validate(size)
    assert note.startswith(f"model.{name}=True needs Transformer Engine, which is not installed")
    monkeypatch.setattr(distributed, "world_size", lambda: size)
    with pytest.raises(
        UserError, match=f"model.{name}=True needs Transformer Engine, which is not installed: "
    ):
        toy_config(model=model).validate()


def test_layers_of_torch_do_it_nowhere(monkeypatch):
    monkeypatch.setattr(layer_specs, "has_transformer_engine", lambda: True)
    with pytest.raises(
        UserError,
        match=r"tp_comm_overlap=True needs Transformer Engine, but model.backend is torch",
    ):
        toy_config(model={"tp_comm_overlap": True, "backend": "torch"}).validate()


def test_settings_of_products_must_be_a_mapping(tmp_path):
    (tmp_path / "buffers.yaml").write_text("qkv_fprop: {method: ring_exchange}\n")
    assert user_buffers._read_settings(str(tmp_path / "buffers.yaml")) == {
        "qkv_fprop": {"method": "ring_exchange"}
    }
    with pytest.raises(UserError, match="cannot be read"):
        user_buffers._read_settings(str(tmp_path / "none.yaml"))
    (tmp_path / "buffers.yaml").write_text("- a\n")
    with pytest.raises(UserError, match="must be a mapping"):
        user_buffers._read_settings(str(tmp_path / "buffers.yaml"))
