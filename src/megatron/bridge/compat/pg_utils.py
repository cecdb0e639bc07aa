# SPDX-License-Identifier: Apache-2.0
"""The process groups of a model."""

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection


def get_pg_collection(model: Any) -> ProcessGroupCollection:
    """The groups that ``model`` was built on: Megatron-Core's own, as for every model here."""
    del model
    return ProcessGroupCollection.use_mpu_process_groups()
