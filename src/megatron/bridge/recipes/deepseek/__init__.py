# SPDX-License-Identifier: Apache-2.0
"""Recipes of the DeepSeek family."""

from megatron.bridge.recipes.catalog import name_functions
from megatron.bridge.recipes.deepseek.deepseek_v2 import *
from megatron.bridge.recipes.deepseek.deepseek_v3 import *

name_functions(__name__)
