# SPDX-License-Identifier: Apache-2.0
"""Recipes of the OLMo family."""

from megatron.bridge.recipes.olmo.olmoe import *
