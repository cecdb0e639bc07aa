# SPDX-License-Identifier: Apache-2.0
"""Choose the modules that CUDA graphs capture."""

from collections.abc import Iterable
from typing import Any


def set_cuda_graph_modules(model_config: Any, modules: str | Iterable[Any]) -> None:
    """Choose the modules of a layer, such as ``attn``, that training graphs capture; Megatron-Core checks them."""
    model_config.cuda_graph_modules = modules if isinstance(modules, str) else list(modules)
