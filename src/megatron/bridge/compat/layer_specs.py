# SPDX-License-Identifier: Apache-2.0
"""Functions that choose the layers of a provider, for its field ``transformer_layer_spec``."""

from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec

from megatron.bridge.backends.specs import hybrid_specs, layer_specs
from megatron.bridge.utils.errors import UserError

TRANSFORMER_ENGINE = "transformer_engine"
TORCH = "torch"


def transformer_engine_layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Return the decoder layers of ``config``, a provider, in Transformer Engine's classes."""
    backend = layer_specs.resolve_backend(TRANSFORMER_ENGINE)
    return layer_specs.decoder_block_spec(config, backend, vp_stage)


def local_layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Return the decoder layers of ``config``, a provider, without Transformer Engine."""
    return layer_specs.decoder_block_spec(config, TORCH, vp_stage)


def modelopt_transformer_layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Return decoder layers whose linear layers ModelOpt can quantize.

    They are Megatron-Core's own parallel linear layers with separate norms, which is what the
    ``torch`` backend has.
    """
    return local_layer_spec(config, vp_stage)


def default_layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Return the decoder layers of the best backend that this machine has."""
    backend = layer_specs.resolve_backend("auto")
    return layer_specs.decoder_block_spec(config, backend, vp_stage)


def transformer_engine_mamba_stack_spec(config: Any = None) -> ModuleSpec:
    """Return the layers of a hybrid model in Transformer Engine's classes.

    Args:
        config: The provider; None returns Megatron-Core's own layers, which fit every provider.
    """
    backend = layer_specs.resolve_backend(TRANSFORMER_ENGINE)
    if config is None:
        return hybrid_specs.hybrid_layer_specs.hybrid_stack_spec
    return hybrid_specs.hybrid_stack_spec(config, backend)


def modelopt_mamba_stack_spec(config: Any = None) -> ModuleSpec:
    """Return the layers of a hybrid model, ``config``, whose linear layers ModelOpt can quantize."""
    if config is None:
        raise UserError(
            "modelopt_mamba_stack_spec() does not know the model: assign the function itself to "
            "hybrid_stack_spec, or call it with the provider"
        )
    return hybrid_specs.hybrid_stack_spec(config, TORCH)


def get_default_mamba_stack_spec(config: Any) -> ModuleSpec:
    """Return the layers of a hybrid model, ``config``, of the best backend that this machine has."""
    return hybrid_specs.hybrid_stack_spec(config, layer_specs.resolve_backend("auto"))
