# SPDX-License-Identifier: Apache-2.0
"""Recipes of the Llama family."""

from megatron.bridge.recipes.catalog import name_functions
from megatron.bridge.recipes.llama.llama2 import *
from megatron.bridge.recipes.llama.llama3 import *
from megatron.bridge.recipes.llama.llama4 import *
from megatron.bridge.recipes.llama.llama31 import *
from megatron.bridge.recipes.llama.llama32 import *

name_functions(__name__)
