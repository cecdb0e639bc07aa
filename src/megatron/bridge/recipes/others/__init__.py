# SPDX-License-Identifier: Apache-2.0
"""Recipes of vendors with few families, by the kind of model."""

from megatron.bridge.recipes.catalog import name_functions
from megatron.bridge.recipes.others.dense import *
from megatron.bridge.recipes.others.experts import *
from megatron.bridge.recipes.others.hybrid import *

name_functions(__name__)
