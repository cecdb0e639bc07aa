# SPDX-License-Identifier: Apache-2.0
"""Recipes of the SmolLM family."""

from megatron.bridge.recipes.catalog import name_functions
from megatron.bridge.recipes.smollm.smollm2 import *
from megatron.bridge.recipes.smollm.smollm3 import *
from megatron.bridge.recipes.smollm.smolvlm2 import *

name_functions(__name__)
