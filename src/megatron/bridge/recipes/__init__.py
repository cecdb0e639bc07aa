# SPDX-License-Identifier: Apache-2.0
"""Recipes: each builds a complete config when it is called.

For example ``megatron.bridge.recipes.llama.llama32_1b_pretrain_config(train_iters=100)``. Every recipe can also be
imported from this package: ``from megatron.bridge.recipes import llama32_1b_pretrain_config``. The import is light:
only the call imports torch.
"""

from typing import TYPE_CHECKING, Any

from megatron.bridge.recipes.audio import *
from megatron.bridge.recipes.deepseek import *
from megatron.bridge.recipes.gemma import *
from megatron.bridge.recipes.glm import *
from megatron.bridge.recipes.gpt import *
from megatron.bridge.recipes.gpt_oss import *
from megatron.bridge.recipes.llama import *
from megatron.bridge.recipes.mistral import *
from megatron.bridge.recipes.moonshot import *
from megatron.bridge.recipes.nemotron import *
from megatron.bridge.recipes.olmo import *
from megatron.bridge.recipes.others import *
from megatron.bridge.recipes.qwen import *
from megatron.bridge.recipes.smollm import *

if TYPE_CHECKING:
    from megatron.bridge.recipes.defaults import default_peft_config as default_peft_config
    from megatron.bridge.recipes.defaults import default_squad_config as default_squad_config


def __getattr__(name: str) -> Any:
    """Import the functions that need torch at their first use."""
    if name in ("default_peft_config", "default_squad_config"):
        from megatron.bridge.recipes import defaults

        return getattr(defaults, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
