# SPDX-License-Identifier: Apache-2.0
"""The mappings of DeepSeek's layers, for bridges of other programs that share them."""

from typing import Any

from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping
from megatron.bridge.models.deepseek.deepseek_v3_bridge import DeepseekV2Bridge, DeepseekV3Bridge


def get_common_mapping_list(hf_config: Any = None) -> list[MegatronParamMapping]:
    """Return mappings for latent attention, dense layers, experts, embeddings and output layer.

    Args:
        hf_config: The transformers config. If it declares layers of multi-token prediction
            (``num_nextn_predict_layers``), their mappings are included.
    """
    if not getattr(hf_config, "num_nextn_predict_layers", 0):
        return DeepseekV2Bridge().mapping_registry().get_all_mappings()
    provider = DeepseekV3Bridge().provider_bridge(_WithConfig(hf_config))
    return DeepseekV3Bridge().registry_for(provider).get_all_mappings()


class _WithConfig:
    """A config where a bridge expects a checkpoint."""

    def __init__(self, config: Any) -> None:
        self.config = config
