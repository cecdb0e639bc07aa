# SPDX-License-Identifier: Apache-2.0
"""Layers of multi-token prediction, by Megatron-Core's own settings.

They are layers after those of the decoder, and an objective: ``layer_specs.mtp_block_spec`` describes the layers,
``kernels.mtp_loss`` computes the loss, and ``training`` and ``checkpoint`` know the objective.
"""

from typing import Any

from megatron.bridge.models.features.feature import LayerFeature, ToySizes


class MultiTokenPredictionFeature(LayerFeature):
    switches = {"mtp_num_layers": None}
    prefixes = ("mtp_",)
    prefix_switch = "mtp_num_layers"
    pricing = {
        "mtp_num_layers": "counted",
        "mtp_standalone": "unpriced",
        "mtp_use_repeated_layer": "modules",
        "mtp_loss_scaling_factor": "numbers",
        "mtp_detach_heads": "numbers",
    }

    def toy_sizes(self, config: Any, toy: ToySizes) -> dict[str, Any]:
        return {"mtp_num_layers": 1} if config.mtp_num_layers else {}


def drop_mtp_layers(provider: Any) -> None:
    """Leave out the layers of multi-token prediction, also from the layout of the pipeline's stages."""
    provider.mtp_num_layers = None
    layout = provider.pipeline_model_parallel_layout
    if isinstance(layout, str):
        provider.pipeline_model_parallel_layout = layout.replace("m", "")
