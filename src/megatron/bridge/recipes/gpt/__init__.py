# SPDX-License-Identifier: Apache-2.0
"""Recipes of the GPT family."""

from megatron.bridge.recipes.gpt.gpt3 import *
