# SPDX-License-Identifier: Apache-2.0
"""Recipes of the gpt-oss family."""

from megatron.bridge.recipes.catalog import name_functions
from megatron.bridge.recipes.gpt_oss.gpt_oss import *

name_functions(__name__)
