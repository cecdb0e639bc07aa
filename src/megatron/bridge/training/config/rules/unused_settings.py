# SPDX-License-Identifier: Apache-2.0
"""The rule on settings of features that are off."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from megatron.bridge.training.config.rules.lookup import value_of
from megatron.bridge.training.config.run_config import RunConfig

WSD, FAULT = "scheduler.lr_decay_style=WSD", "ft.simulate_fault"
HF_TOKENIZER = "tokenizer.tokenizer_type=HuggingFaceTokenizer"

# setting -> what must be set, or have this value, for it to have an effect
NEEDS = {
    "tokenizer.tokenizer_model": HF_TOKENIZER,
    "tokenizer.trust_remote_code": HF_TOKENIZER,
    "model.rope_scaling_factor": "model.rope_scaling",
    "scheduler.lr_wsd_decay_style": WSD,
    "scheduler.lr_wsd_decay_iters": WSD,
    "scheduler.lr_wsd_decay_samples": WSD,
    "optimizer.decoupled_min_lr": "optimizer.decoupled_lr",
    "ddp.align_param_gather": "ddp.overlap_param_gather",
    "comm_overlap.tp_comm_overlap_cfg": "comm_overlap.tp_comm_overlap",
    "comm_overlap.tp_comm_bootstrap_backend": "comm_overlap.tp_comm_overlap",
    "comm_overlap.wgrad_deferral_limit": "comm_overlap.defer_embedding_wgrad_compute",
    "checkpoint.save_interval": "checkpoint.save",
    "checkpoint.async_save": "checkpoint.save",
    "checkpoint.async_strategy": "checkpoint.async_save",
    "logger.timing_log_option": "logger.timing_log_level",
    "logger.sample_interval": "logger.sample_prompts",
    "logger.sample_max_new_tokens": "logger.sample_prompts",
    "logger.wandb_entity": "logger.wandb_project",
    "logger.wandb_exp_name": "logger.wandb_project",
    "logger.wandb_save_dir": "logger.wandb_project",
    "logger.mlflow_run_name": "logger.mlflow_experiment",
    "logger.mlflow_tracking_uri": "logger.mlflow_experiment",
    "logger.prometheus_host": "logger.prometheus_port",
    "profiling.memory_snapshot_path": "profiling.record_memory_history",
    "rerun_state_machine.spiky_loss_factor": "rerun_state_machine.check_for_spiky_loss",
    "rerun_state_machine.spiky_loss_samples": "rerun_state_machine.check_for_spiky_loss",
    "rerun_state_machine.when_persistent": "checkpoint.save",  # the batches to skip are noted there
    "ft.calc_ft_timeouts": "checkpoint.save",  # they are for the next start
    "ft.simulate_fault": "checkpoint.save",  # that it has happened is noted there, or no start would reach the end
    "ft.simulated_fault_type": FAULT,
    "ft.simulated_fault_rank": FAULT,
    "ft.simulated_fault_base_delay": FAULT,
}


def settings_have_effect(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings of a feature that is off would be ignored."""
    for key, needed in NEEDS.items():
        if _is_set(config, key) and not _holds(config, needed):
            yield f"{key}={value_of(config, key)} has no effect without {needed}: set that, too, or remove it"


def _is_set(config: RunConfig, key: str) -> bool:
    block, _, name = key.partition(".")
    owner: Any = getattr(config, block)
    if owner is None:
        return False
    (default,) = (entry.default for entry in dataclasses.fields(owner) if entry.name == name)
    return getattr(owner, name) != default


def _holds(config: RunConfig, needed: str) -> bool:
    key, _, wanted = needed.partition("=")
    found = value_of(config, key)
    return found == wanted if wanted else bool(found)
