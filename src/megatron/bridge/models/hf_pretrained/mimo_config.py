# SPDX-License-Identifier: Apache-2.0
"""The config of MiMo models, which is remote code on the hub: read here without running it."""

from huggingface_hub.dataclasses import strict
from transformers import Qwen2Config


@strict
class MiMoConfig(Qwen2Config):
    """Qwen2's config with layers of multi-token prediction."""

    model_type = "mimo"

    num_nextn_predict_layers: int = 0
