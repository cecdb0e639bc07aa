# SPDX-License-Identifier: Apache-2.0
"""How a Megatron parameter and its Hugging Face tensors are made of the same numbers: all mappings by name.

``mappings.base`` has the algebra and the mappings of one tensor to one parameter, ``mappings.fused`` those of
attention and feed-forward layers, ``mappings.recurrent`` those of layers without attention.
"""

from megatron.bridge.models.conversion.mappings.base import *
from megatron.bridge.models.conversion.mappings.fused import *
from megatron.bridge.models.conversion.mappings.recurrent import *
