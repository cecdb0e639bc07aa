# SPDX-License-Identifier: Apache-2.0
"""What a bridge is made of, in this package and in yours: ``DecoderBridge``, fields, blocks, mappings, providers.

docs/adding-a-family.md lists them all.
"""

from megatron.bridge.models.conversion.declare.blocks import *
from megatron.bridge.models.conversion.declare.decoder_fields import *
from megatron.bridge.models.conversion.declare.falcon_fields import *
from megatron.bridge.models.conversion.declare.fields import *
from megatron.bridge.models.conversion.declare.gated_delta_net import *
from megatron.bridge.models.conversion.declare.gemma4_fields import *
from megatron.bridge.models.conversion.declare.heterogeneous_fields import *
from megatron.bridge.models.conversion.declare.hybrid import *
from megatron.bridge.models.conversion.declare.llama4_fields import *
from megatron.bridge.models.conversion.declare.mla import *
from megatron.bridge.models.conversion.declare.moe import *
from megatron.bridge.models.conversion.declare.vision import *
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import (
    DecoderBridge,
    MegatronModelBridge,
    register_bridge,
)
from megatron.bridge.models.conversion.param_mapping import *
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.heterogeneous_provider import HeterogeneousModelProvider
from megatron.bridge.models.mamba_provider import MambaModelProvider
from megatron.bridge.models.mla_provider import MLAModelProvider
