# SPDX-License-Identifier: Apache-2.0
"""Recipes of the Nemotron family."""

from megatron.bridge.recipes.catalog import name_functions
from megatron.bridge.recipes.nemotron.llama_nemotron import *
from megatron.bridge.recipes.nemotron.nemotron4 import *
from megatron.bridge.recipes.nemotron.nemotron_h import *
from megatron.bridge.recipes.nemotron.nemotron_nano import *
from megatron.bridge.recipes.nemotron.nemotron_nano_vl import *

name_functions(__name__)
