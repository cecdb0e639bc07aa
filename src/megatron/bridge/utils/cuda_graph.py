# SPDX-License-Identifier: Apache-2.0
"""Which modules CUDA graphs capture."""

from collections.abc import Iterable
from typing import Any


def set_cuda_graph_modules(model_config: Any, modules: str | Iterable[Any]) -> None:
    """Choose what training graphs capture of a layer, such as ``attn``; Megatron-Core checks it later."""
    model_config.cuda_graph_modules = modules if isinstance(modules, str) else list(modules)
