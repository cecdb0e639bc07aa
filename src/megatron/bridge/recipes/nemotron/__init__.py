# SPDX-License-Identifier: Apache-2.0
"""Recipes of the Nemotron family."""

from megatron.bridge.recipes.nemotron.llama_nemotron import (
    llama_nemotron_8b_finetune_config,
    llama_nemotron_8b_pretrain_config,
    llama_nemotron_49b_finetune_config,
    llama_nemotron_49b_pretrain_config,
    llama_nemotron_253b_finetune_config,
    llama_nemotron_253b_pretrain_config,
)
from megatron.bridge.recipes.nemotron.nemotron4 import (
    minitron_4b_finetune_config,
    minitron_4b_pretrain_config,
    minitron_8b_finetune_config,
    minitron_8b_pretrain_config,
    nemotron4_15b_finetune_config,
    nemotron4_15b_pretrain_config,
    nemotron4_340b_finetune_config,
    nemotron4_340b_pretrain_config,
)
from megatron.bridge.recipes.nemotron.nemotron_h import (
    nemotronh_4b_finetune_config,
    nemotronh_4b_pretrain_config,
    nemotronh_8b_finetune_config,
    nemotronh_8b_pretrain_config,
    nemotronh_47b_finetune_config,
    nemotronh_47b_pretrain_config,
    nemotronh_56b_finetune_config,
    nemotronh_56b_pretrain_config,
)
from megatron.bridge.recipes.nemotron.nemotron_nano import (
    nemotron_3_nano_finetune_config,
    nemotron_3_nano_pretrain_config,
    nemotron_nano_9b_v2_finetune_config,
    nemotron_nano_9b_v2_pretrain_config,
    nemotron_nano_12b_v2_finetune_config,
    nemotron_nano_12b_v2_pretrain_config,
)

__all__ = [
    "llama_nemotron_8b_finetune_config",
    "llama_nemotron_8b_pretrain_config",
    "llama_nemotron_49b_finetune_config",
    "llama_nemotron_49b_pretrain_config",
    "llama_nemotron_253b_finetune_config",
    "llama_nemotron_253b_pretrain_config",
    "minitron_4b_finetune_config",
    "minitron_4b_pretrain_config",
    "minitron_8b_finetune_config",
    "minitron_8b_pretrain_config",
    "nemotron4_15b_finetune_config",
    "nemotron4_15b_pretrain_config",
    "nemotron4_340b_finetune_config",
    "nemotron4_340b_pretrain_config",
    "nemotron_3_nano_finetune_config",
    "nemotron_3_nano_pretrain_config",
    "nemotron_nano_9b_v2_finetune_config",
    "nemotron_nano_9b_v2_pretrain_config",
    "nemotron_nano_12b_v2_finetune_config",
    "nemotron_nano_12b_v2_pretrain_config",
    "nemotronh_4b_finetune_config",
    "nemotronh_4b_pretrain_config",
    "nemotronh_8b_finetune_config",
    "nemotronh_8b_pretrain_config",
    "nemotronh_47b_finetune_config",
    "nemotronh_47b_pretrain_config",
    "nemotronh_56b_finetune_config",
    "nemotronh_56b_pretrain_config",
]
