# SPDX-License-Identifier: Apache-2.0
"""A state of Megatron-FSDP that a program saves and loads itself, as verl does."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state

from megatron.bridge.training.checkpointing import (
    load_fsdp_dtensor_checkpoint,
    save_fsdp_dtensor_checkpoint,
)
from megatron.bridge.utils.errors import UserError
from tests.toy_run import toy_config


def build(seed):
    config = toy_config()
    config.model.initialize_model_parallel(seed=seed)
    return config.model.provide_distributed_model(
        ddp_config=config.ddp.__class__(
            use_megatron_fsdp=True,
            use_distributed_optimizer=True,
            data_parallel_sharding_strategy="optim_grads_params",
        )
    )


def local_values(chunk):
    return {
        name: getattr(value, "_local_tensor", value).detach().clone()
        for name, value in chunk.state_dict_for_save_checkpoint().items()
        if isinstance(value, torch.Tensor)
    }


def round_trip(folder):
    """Save one model, load it into another one; both have the toy's gated feed-forward layers."""
    (saved,) = build(seed=1)
    state = {"model": saved.state_dict_for_save_checkpoint(), "rng_state": {"step": 3}}
    save_fsdp_dtensor_checkpoint(folder, state, cfg=None, model=saved.module)
    expected = local_values(saved)
    parallel_state.destroy_model_parallel()
    (loaded,) = build(seed=2)
    differ = any(
        not torch.equal(value, expected[name]) for name, value in local_values(loaded).items()
    )
    target = {"model": loaded.state_dict_for_save_checkpoint(), "rng_state": {"step": 0}}
    target["_model"] = [loaded.module]
    state, _, _, kind = load_fsdp_dtensor_checkpoint(
        load_dir=folder,
        ckpt_cfg=SimpleNamespace(strict_fsdp_dtensor_load=True),
        rank0=False,
        sharded_state_dict=target,
        iteration=None,
        checkpoint_path_override=folder,
    )
    loaded.load_state_dict(state["model"], strict=False)
    values = local_values(loaded)
    same = [name for name in expected if torch.equal(values[name], expected[name])]
    parallel_state.destroy_model_parallel()
    return differ, len(same) == len(expected), len(expected), state["rng_state"], kind


def test_state_of_two_ranks(two_workers, tmp_path):
    for differ, same, count, rng_state, kind in two_workers.run(round_trip, str(tmp_path)):
        assert differ
        assert same
        assert count > 10
        assert rng_state == {"step": 3}
        assert kind == "fsdp_dtensor"


def test_state_without_its_chunks_is_refused(tmp_path):
    with pytest.raises(UserError, match="_model"):
        load_fsdp_dtensor_checkpoint(str(tmp_path), None, False, {"model": {}}, None)
    outcome = load_fsdp_dtensor_checkpoint(str(tmp_path), None, True, None, 7)
    assert outcome == ({}, str(tmp_path / "iter_0000007"), False, "fsdp_dtensor")
