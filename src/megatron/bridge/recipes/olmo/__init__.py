# SPDX-License-Identifier: Apache-2.0
"""Recipes of the OLMo family."""

from megatron.bridge.recipes.catalog import name_functions
from megatron.bridge.recipes.olmo.olmo import *

name_functions(__name__)
