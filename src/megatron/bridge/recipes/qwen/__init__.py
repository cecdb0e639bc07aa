# SPDX-License-Identifier: Apache-2.0
"""Recipes of the Qwen family."""

from megatron.bridge.recipes.catalog import name_functions
from megatron.bridge.recipes.qwen.qwen2 import *
from megatron.bridge.recipes.qwen.qwen3 import *
from megatron.bridge.recipes.qwen.qwen3_moe import *
from megatron.bridge.recipes.qwen.qwen3_next import *
from megatron.bridge.recipes.qwen.qwen3_vl import *
from megatron.bridge.recipes.qwen.qwen15 import *
from megatron.bridge.recipes.qwen.qwen25 import *
from megatron.bridge.recipes.qwen.qwen25_vl import *

name_functions(__name__)
