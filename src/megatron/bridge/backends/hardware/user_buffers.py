# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's user buffers, which overlap matrix products with communication (``tp_comm_overlap``).

Untested: this needs two GPUs with Transformer Engine.
"""

import inspect
from pathlib import Path
from typing import Any

import yaml
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.bridge.utils.errors import UserError


def initialize_user_buffers(config: TransformerConfig, tokens: int, settings: str | None) -> None:
    """Set up the buffers after the process groups and before the model.

    ``tokens`` is the number of a microbatch's tokens on a context-parallel rank, ``settings`` a YAML file with
    Transformer Engine's settings of each product; None uses its defaults.
    """
    from transformer_engine.pytorch.module import base  # pyright: ignore[reportMissingImports]

    base.initialize_ub(
        shape=[tokens, config.hidden_size],
        tp_size=config.tensor_model_parallel_size,
        ub_cfgs=_read_settings(settings),
        bootstrap_backend=config.tp_comm_bootstrap_backend,
        **_buffer_formats(base, config),
    )


def _buffer_formats(base: Any, config: TransformerConfig) -> dict[str, Any]:
    """Return the formats of the buffers: a flag before version 2.7, a list since then."""
    if "quantization_modes" not in inspect.signature(base.initialize_ub).parameters:
        return {"use_fp8": config.fp8 is not None}
    modes = base.UserBufferQuantizationMode
    if config.fp8 is None:
        return {"quantization_modes": [modes.NONE]}
    return {
        "quantization_modes": [modes.FP8, *([modes.NONE] if config.first_last_layers_bf16 else [])]
    }


def _read_settings(settings: str | None) -> dict[str, Any]:
    if settings is None:
        return {}
    try:
        content = yaml.safe_load(Path(settings).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserError(
            f"comm_overlap.tp_comm_overlap_cfg={settings} cannot be read: {error}"
        ) from error
    if not isinstance(content, dict):
        raise UserError(
            f"comm_overlap.tp_comm_overlap_cfg={settings} must be a mapping of products to settings"
        )
    return content
