# SPDX-License-Identifier: Apache-2.0
"""All mappings between Megatron parameters and Hugging Face tensors, in one namespace.

``mappings.base`` has the base class and the mappings with one tensor, ``mappings.fused`` those of attention and
feed-forward layers, ``mappings.recurrent`` those of layers without attention.
"""

from megatron.bridge.models.conversion.mappings.base import *
from megatron.bridge.models.conversion.mappings.fused import *
from megatron.bridge.models.conversion.mappings.recurrent import *
