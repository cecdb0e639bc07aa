# SPDX-License-Identifier: Apache-2.0
"""Saving and loading the checkpoints of runs."""

from megatron.bridge.utils.optional_imports import lazy_names

_HOME = "megatron.bridge.compat.training_calls"
_CALLS = (
    "apply_peft_adapter_filter_to_state_dict",
    "checkpoint_exists",
    "init_checkpointing_context",
)
_CALLS += ("load_checkpoint", "maybe_finalize_async_save", "save_checkpoint")
# as the programs that call them spell them
_CALLS += (
    "_generate_model_state_dict",
    "_load_checkpoint_from_path",
    "_load_model_weights_from_checkpoint",
)

_FSDP = "megatron.bridge.compat.fsdp_checkpoints"
_FSDP_CALLS = ("load_fsdp_dtensor_checkpoint", "save_fsdp_dtensor_checkpoint")

__getattr__ = lazy_names(
    __name__,
    {name: f"{_HOME}:{name.removeprefix('_')}" for name in _CALLS}
    | {name: f"{_FSDP}:{name}" for name in _FSDP_CALLS},
)
