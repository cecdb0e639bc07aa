# SPDX-License-Identifier: Apache-2.0
"""Config classes of models that are remote code on the hub, which need not run."""

from typing import Any


def own_config(kind: str) -> Any:
    """The class of configs with the ``model_type`` ``kind``; None if transformers has it."""
    if kind == "nemotron-nas":
        from megatron.bridge.models.hf_pretrained.deci_config import DeciConfig

        return DeciConfig
    if kind == "NemotronH_Nano_VL_V2":
        from megatron.bridge.models.hf_pretrained.nano_vl_config import NanoVLConfig

        return NanoVLConfig
    if kind == "mimo":
        from megatron.bridge.models.hf_pretrained.mimo_config import MiMoConfig

        return MiMoConfig
    return None
