# SPDX-License-Identifier: Apache-2.0
"""VaultGemma: Gemma 2 without the norms after attention and MLP, trained with differential privacy."""

from megatron.bridge.models.conversion.model_bridge import register_bridge
from megatron.bridge.models.gemma.gemma2_bridge import Gemma2Bridge


@register_bridge("VaultGemmaForCausalLM", model_type="vaultgemma")
class VaultGemmaBridge(Gemma2Bridge):
    fixed = {**Gemma2Bridge.fixed, "norm_placement": "pre"}
    weights = Gemma2Bridge.weights[:-1]
