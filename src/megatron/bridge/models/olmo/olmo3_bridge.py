# SPDX-License-Identifier: Apache-2.0
"""OLMo 3: OLMo 2 with windows in three of four layers, a rotary scaling in the others."""

from megatron.bridge.models.families import *
from megatron.bridge.models.olmo.olmo2_bridge import Olmo2Bridge


@register_bridge("Olmo3ForCausalLM", model_type="olmo3")
class Olmo3Bridge(Olmo2Bridge):
    fields = (*override(Olmo2Bridge.fields, LAYER_ROPE), *WINDOWS)
