# SPDX-License-Identifier: Apache-2.0
"""Recipes of the GLM family."""

from megatron.bridge.recipes.catalog import name_functions
from megatron.bridge.recipes.glm.glm4 import *
from megatron.bridge.recipes.glm.glm45 import *
from megatron.bridge.recipes.glm.glm45v import *

name_functions(__name__)
