# SPDX-License-Identifier: Apache-2.0
"""Process groups that callers hand in: Megatron-Core's own, since models are built on them."""

from typing import Any

from megatron.core import parallel_state

from megatron.bridge.utils.errors import UserError

_OWN = {
    "tp": parallel_state.get_tensor_model_parallel_group,
    "pp": parallel_state.get_pipeline_model_parallel_group,
    "cp": parallel_state.get_context_parallel_group,
    "dp": parallel_state.get_data_parallel_group,
    "ep": parallel_state.get_expert_model_parallel_group,
}


def refuse_others(groups: Any) -> None:
    """Refuse a ``ProcessGroupCollection``, but for None, that does not hold the groups of ``parallel_state``."""
    if groups is None or not parallel_state.model_parallel_is_initialized():
        return
    for name, own in _OWN.items():
        theirs = getattr(groups, name, None)
        if theirs is not None and theirs is not own():
            raise UserError(
                f"pg_collection.{name} is another group than megatron.core.parallel_state's, on which models are "
                "built: leave pg_collection out, or use ProcessGroupCollection.use_mpu_process_groups()"
            )
