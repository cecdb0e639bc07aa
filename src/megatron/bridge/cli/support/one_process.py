# SPDX-License-Identifier: Apache-2.0
"""Fit the layout of a recipe to a run of one process, so that any recipe can be tried on a laptop."""

from typing import Any

from megatron.bridge.cli.support.train_job import TrainJob
from megatron.bridge.utils.config.overrides import Change

_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_WITHOUT_RANKS: dict[str, Any] = {
    "sequence_parallel": False,
    "hybrid_context_parallel": False,
    "max_seqlen_per_dp_cp_rank": None,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
"""Settings of the model that need several ranks -> their values on one."""

_ORIGIN = "one process"


def fit_to_one_process(job: TrainJob) -> None:
    """Set the parallel sizes of a recipe to 1, in place, and add a note.

    Nothing changes if the user chose a parallel size: that one needs its processes.
    """
    model = job.config.model
    chosen = {change.key for change in job.changes}
    sizes = {name: getattr(model, name) for name in _SIZES if (getattr(model, name) or 1) > 1}
    if job.recipe is None or not sizes or any(f"model.{name}" in chosen for name in _SIZES):
        return

    changes: list[Change] = []
    for name, value in {**dict.fromkeys(sizes, 1), **_WITHOUT_RANKS}.items():
        previous = getattr(model, name)
        if previous != value and f"model.{name}" not in chosen:
            setattr(model, name, value)
            changes.append(Change(f"model.{name}", previous, value, _ORIGIN))
    overlap = job.config.comm_overlap
    is_chosen = any(key.startswith("comm_overlap") for key in chosen)
    if overlap is not None and not is_chosen:
        changes.append(Change("comm_overlap", overlap, None, _ORIGIN))
        job.config.comm_overlap = None
    job.origins.record(job.config, changes)

    layout = ", ".join(f"model.{name}={size}" for name, size in sizes.items())
    job.notes.append(
        f"this is one process, so the layout of {job.recipe.name} ({layout}) is not used: every size is 1; set a "
        "size yourself to start several processes"
    )
