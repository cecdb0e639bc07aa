# SPDX-License-Identifier: Apache-2.0
"""Command R7B and A: Command R with windows; only layers with a window have a rotary embedding."""

from megatron.bridge.models.cohere.cohere_bridge import CohereBridge
from megatron.bridge.models.families import *


@register_bridge("Cohere2ForCausalLM", model_type="cohere2")
class Cohere2Bridge(CohereBridge):
    fields = (*(field for field in CohereBridge.fields if field.hf != "use_qk_norm"), WINDOW, WINDOWED_ROPE)
    # published configs have them; transformers reads none, but makes layer_types of sliding_window_pattern
    irrelevant = {
        **dict.fromkeys(("use_parallel_block", "use_embedding_sharing", "use_gated_activation"), (True,)),
        **dict.fromkeys(("rotary_pct", "order_of_interleaved_layers", "layer_switch", "position_embedding_type")),
        **dict.fromkeys(("sliding_window_pattern", "_sliding_window_pattern", "use_parallel_embedding")),
        "use_qk_norm": (False,),
    }
