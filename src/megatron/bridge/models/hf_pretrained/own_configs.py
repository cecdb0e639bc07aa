# SPDX-License-Identifier: Apache-2.0
"""Config classes of models that are remote code on the hub, which need not run."""

from typing import Any

_CLASSES = {
    "nemotron-nas": "DeciConfig",
    "NemotronH_Nano_VL_V2": "NanoVLConfig",
    "mimo": "MiMoConfig",
}


def own_config(kind: str) -> Any:
    """The class of configs with the ``model_type`` ``kind``; None if transformers has it."""
    if kind not in _CLASSES:
        return None
    from megatron.bridge.models.hf_pretrained import remote_configs  # imports transformers

    return getattr(remote_configs, _CLASSES[kind])
