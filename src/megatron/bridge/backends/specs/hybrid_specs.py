# SPDX-License-Identifier: Apache-2.0
"""Layers of hybrid models: each is a Mamba-2 mixer, attention, a feed-forward layer, or experts.

As in ``layer_specs``, both backends have the same parameters and checkpoint keys.
"""

import dataclasses
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.hybrid import hybrid_layer_specs
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron.bridge.backends.attention.kernel_choice import install_kernel_choice
from megatron.bridge.backends.kernels.norms import TorchNorm
from megatron.bridge.backends.moe import aux_loss_metrics
from megatron.bridge.backends.recurrent import mamba as torch_mamba
from megatron.bridge.backends.specs.layer_specs import layer_spec, with_provider_features
from megatron.bridge.backends.specs.torch_spec import TorchSpecProvider


def hybrid_stack_spec(config: TransformerConfig, backend: str) -> ModuleSpec:
    """The spec of a hybrid model; the pattern of the model selects the layers."""
    install_kernel_choice()
    if config.num_moe_experts is not None:
        aux_loss_metrics.install_growing_tracker()
    if backend == "transformer_engine":
        # Megatron-Core's spec with a mixer of this package
        spec = hybrid_layer_specs.hybrid_stack_spec
        layers: Any = spec.submodules
        mamba = layers.mamba_layer
        parts = dataclasses.replace(
            mamba.submodules, mixer=_mixer_spec(config, mamba.submodules.mixer.submodules)
        )
        mamba = dataclasses.replace(mamba, submodules=parts)
        return dataclasses.replace(spec, submodules=dataclasses.replace(layers, mamba_layer=mamba))
    provider = TorchSpecProvider()
    return ModuleSpec(
        module=TorchHybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=_mamba_layer(config, provider),
            attention_layer=_attention_layer(config, provider),
            mlp_layer=_feed_forward_layer(config, provider, moe=False),
            moe_layer=_feed_forward_layer(config, provider, moe=True)
            if config.num_moe_experts
            else MLPLayer,
        ),
    )


class TorchHybridStack(HybridStack):
    """Megatron-Core's stack with a final norm that works without Transformer Engine."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs, post_layer_norm=False)
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)


def _mixer_spec(config: TransformerConfig, linears: MambaMixerSubmodules) -> ModuleSpec:
    names = {
        "d_conv": "mamba_conv_kernel",
        "chunk_size": "mamba_chunk_size",
        "dt_min": "mamba_first_step_min",
        "dt_max": "mamba_first_step_max",
        "dt_init_floor": "mamba_first_step_floor",
    }
    given = {
        core_name: getattr(config, provider_name) for core_name, provider_name in names.items()
    }
    return ModuleSpec(module=torch_mamba.mixer_class(), params=given, submodules=linears)


def _mamba_layer(config: TransformerConfig, provider: BackendSpecProvider) -> ModuleSpec:
    linears = MambaMixerSubmodules(
        in_proj=provider.column_parallel_linear(), out_proj=provider.row_parallel_linear()
    )
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=provider.layer_norm(has_residual=True),
            mixer=_mixer_spec(config, linears),
            mamba_bda=get_bias_dropout_add,  # type: ignore[arg-type] - a function, as in Megatron-Core's specs
            sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
        ),
    )


def _attention_layer(config: TransformerConfig, provider: BackendSpecProvider) -> ModuleSpec:
    """The first half of a decoder layer."""
    full_layer = with_provider_features(
        layer_spec(config, provider, moe=False), config, None, provider
    )
    return _half_layer(
        TransformerLayer, full_layer, "input_layernorm", "self_attention", "self_attn_bda"
    )


def _feed_forward_layer(
    config: TransformerConfig, provider: BackendSpecProvider, moe: bool
) -> ModuleSpec:
    """The second half of a decoder layer."""
    full_layer = with_provider_features(layer_spec(config, provider, moe), config, None, provider)
    return _half_layer(
        TransformerLayer if moe else MLPLayer, full_layer, "pre_mlp_layernorm", "mlp", "mlp_bda"
    )


def _half_layer(module: type[Any], full_layer: ModuleSpec, *parts: str) -> ModuleSpec:
    """A layer with only some ``parts`` of another one."""
    submodules = {
        name: getattr(full_layer.submodules, name)
        for name in (*parts, "sharded_state_dict_keys_map")
    }
    return ModuleSpec(module=module, submodules=TransformerLayerSubmodules(**submodules))
