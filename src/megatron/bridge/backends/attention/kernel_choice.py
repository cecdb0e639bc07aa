# SPDX-License-Identifier: Apache-2.0
"""The attention kernels that a model lets Transformer Engine choose from, without a trace in the process.

Transformer Engine reads environment variables when attention runs. Megatron-Core sets them when a model is built, and
refuses the next model that wants others. Here each attention module sets those of its model while it runs.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.enums import AttnBackend
from torch import nn

from megatron.bridge.utils.errors import UserError

KERNELS = {
    "NVTE_FLASH_ATTN": AttnBackend.flash,
    "NVTE_FUSED_ATTN": AttnBackend.fused,
    "NVTE_UNFUSED_ATTN": AttnBackend.unfused,
}
_FLASH_VERSIONS = (2, 3, 4)
_TE_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"


def install_kernel_choice() -> None:
    """Replace what Megatron-Core does with environment variables; safe to call again."""
    model: Any = LanguageModule
    model._set_attention_backend = _choose_kernels


def kernel_variables(config: Any) -> dict[str, str]:
    """Return the environment variables that stand for ``attention_backend`` and ``flash_attention_version``."""
    backend = config.attention_backend
    variables = {
        name: str(int(backend in (kernel, AttnBackend.auto))) for name, kernel in KERNELS.items()
    }
    if config.flash_attention_version is not None:
        for version in _FLASH_VERSIONS:
            if version != config.flash_attention_version:
                variables[f"NVTE_FLASH_ATTN_V{version}"] = "0"
    return variables


def _choose_kernels(self: Any) -> None:
    """Check that the environment does not contradict the config; choose kernels when the model first runs."""
    variables = kernel_variables(self.config)
    for name, value in variables.items():
        if os.environ.get(name, value) != value:
            raise UserError(
                f"the environment variable {name}={os.environ[name]} contradicts "
                f"model.attention_backend={self.config.attention_backend.name}, which stands for {value}: unset the "
                "variable, and set model.attention_backend to flash, fused, unfused or local"
            )

    def attach(module: nn.Module, _: Any) -> None:
        handle.remove()
        for part in module.modules():
            if _is_transformer_engine(part):
                run_with_variables(part, variables)

    handle = self.register_forward_pre_hook(attach)


def _is_transformer_engine(module: nn.Module) -> bool:
    return any(
        kind.__name__ == "DotProductAttention" and kind.__module__.startswith("transformer_engine")
        for kind in type(module).__mro__
    )


def run_with_variables(module: nn.Module, variables: Mapping[str, str]) -> None:
    """Let ``module`` run with separate environment variables, also when it is recomputed."""
    forward: Callable[..., Any] = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with _restored_environment(variables):
            return forward(*args, **kwargs)

    module.forward = run  # type: ignore[method-assign]


@contextmanager
def _restored_environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    # Transformer Engine chooses again only for other shapes: another model may have made the last choice
    choice: Any = getattr(sys.modules.get(_TE_ATTENTION), "_attention_backends", None)
    if choice is not None and choice.get("variables_of_bridge") != dict(variables):
        choice["backend_selection_requires_update"] = True
        choice["variables_of_bridge"] = dict(variables)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
