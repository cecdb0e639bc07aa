# SPDX-License-Identifier: Apache-2.0
"""Recipes: functions that return a whole config, good as it stands.

``megatron.bridge.recipes.llama.llama32_1b_pretrain_config(train_iters=100)``, for example; ``catalog`` finds them
by name.
"""
