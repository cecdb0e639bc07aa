# SPDX-License-Identifier: Apache-2.0
"""Recipes of the Moonshot family."""

from megatron.bridge.recipes.catalog import name_functions
from megatron.bridge.recipes.moonshot.kimi_k2 import *
from megatron.bridge.recipes.moonshot.moonlight import *

name_functions(__name__)
