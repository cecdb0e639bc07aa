# SPDX-License-Identifier: Apache-2.0
"""Recipes of the Mistral family."""

from megatron.bridge.recipes.catalog import name_functions
from megatron.bridge.recipes.mistral.ministral3 import *
from megatron.bridge.recipes.mistral.mistral import *
from megatron.bridge.recipes.mistral.mixtral import *

name_functions(__name__)
