# SPDX-License-Identifier: Apache-2.0
"""Recipes of the Gemma family."""

from megatron.bridge.recipes.catalog import name_functions
from megatron.bridge.recipes.gemma.gemma import *
from megatron.bridge.recipes.gemma.gemma2 import *
from megatron.bridge.recipes.gemma.gemma3 import *
from megatron.bridge.recipes.gemma.gemma3_vl import *

name_functions(__name__)
