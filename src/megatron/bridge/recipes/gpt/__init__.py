# SPDX-License-Identifier: Apache-2.0
"""Recipes of the GPT family."""

from megatron.bridge.recipes.catalog import name_functions
from megatron.bridge.recipes.gpt.gpt3 import *

name_functions(__name__)
