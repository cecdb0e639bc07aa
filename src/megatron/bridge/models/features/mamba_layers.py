# SPDX-License-Identifier: Apache-2.0
"""Layers with a Mamba mixer instead of attention (Granite 4, Bamba, Jamba), and the costs of all Mamba mixers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.ssm.mamba_mixer import MambaMixer

from megatron.bridge.backends.recurrent.mamba import TorchMambaMixer
from megatron.bridge.backends.recurrent.mamba1 import Mamba1Mixer
from megatron.bridge.backends.recurrent.one_group_mamba import OneGroupMambaMixer
from megatron.bridge.models.features.feature import ToySizes
from megatron.bridge.models.features.mixer_layers import MixerFeature

# bytes of a number
_BF16 = 2
_FP32 = 4


@dataclass
class MambaFields:
    mamba_layers: list[int] | None = None
    """1 for each layer with a Mamba-2 mixer, whose heads are one group, instead of attention; None disables them."""
    mamba_conv_kernel: int = 4
    """Tokens that the convolution of a Mamba layer sees, its own included."""
    mamba_smallest_step: float = 0.0
    """Lower bound of the step by which a token moves the state of a Mamba-2 mixer."""
    mamba_largest_step: float | None = None
    """Upper bound of it; None is none."""
    mamba_dt_rank: int | None = None
    """The mixers of ``mamba_layers`` are Mamba-1, whose steps have this rank; None is Mamba-2."""


class MambaFeature(MixerFeature):
    """The layers of ``mamba_layers``; the costs are also those of mixers beside attention and in hybrid models."""

    field = "mamba_layers"
    switches = {"mamba_layers": None}
    per_layer = ("mamba_layers",)
    # families of such models have the same routing whether a model has experts or not
    prefixes = ("mamba_", "moe_", "use_grouped_gemm_for_shared_expert", "moe_token_dispatcher_type")
    prefix_switch = "mamba_layers"
    pricing = {
        "mamba_layers": "modules",
        "mamba_state_dim": "modules",
        "mamba_head_dim": "modules",
        "mamba_num_groups": "modules",
        "mamba_num_heads": "modules",
        "mamba_conv_kernel": "modules",
        "mamba_dt_rank": "modules",
        "mamba_smallest_step": "numbers",
        "mamba_largest_step": "numbers",
        "use_mamba_mem_eff_path": "unpriced",
        "mamba_training_ssm_states_dtype": "unpriced",
    }
    scales_with_width = ("mamba_num_heads",)
    modules = (MambaMixer, Mamba1Mixer)
    recurrent_modules = (TorchMambaMixer, Mamba1Mixer)

    def mixer_class(self, config: Any) -> type:
        return Mamba1Mixer if config.mamba_dt_rank else OneGroupMambaMixer

    def split_sizes(self, config: Any) -> tuple[str, ...]:
        if config.mamba_dt_rank:
            return ("mamba_num_heads",)
        return ("mamba_num_heads", "mamba_state_dim")

    def required(self, config: Any) -> dict[str, Any]:
        return {**super().required(config), "mamba_num_groups": 1}

    def operations(self, module: Any, length: int) -> float:
        """Count the products within a chunk, and those with the states between chunks (see ``backends.ssd``)."""
        if isinstance(module, Mamba1Mixer):
            return module.operations
        features = module.nheads_local_tp * module.headdim
        chunk = min(module.chunk_size, length)
        within_chunk = module.ngroups_local_tp * module.d_state + features
        return (chunk + 1) * within_chunk + 4 * features * _state_size(module)

    def saved_elements(self, module: Any) -> int:
        """Count the scan's output and its gated output; convolution and states are recomputed."""
        return 2 * module.d_inner_local_tp

    def scan_elements(self, module: Any, tokens: int) -> int:
        if isinstance(module, TorchMambaMixer | Mamba1Mixer):
            return module.scan_numbers(tokens)
        return 0

    # mamba-ssm's backward pass computes four of the five forward kernels again, and the gradients of all five products
    backward_scans = 4.0

    def scan_bytes(self, module: Any) -> float:
        """Count what the five kernels of mamba-ssm move.

        The states of a chunk in fp32 four times; the products of C and B within a chunk in fp32, written and read; the
        features of x twice, gates, and outputs; and B and C twice.
        """
        if isinstance(module, Mamba1Mixer):
            return 0.0
        features = module.nheads_local_tp * module.headdim
        states = features * _state_size(module) / module.chunk_size
        products = module.ngroups_local_tp * module.chunk_size
        shared = 2 * module.ngroups_local_tp * module.d_state
        return _FP32 * (4 * states + 2 * products) + _BF16 * (4 * features + 2 * shared)

    def notes(self, config: Any) -> Iterator[str]:
        if any(config.mamba_layers or ()):
            yield "activations of model.mamba_layers are computed in PyTorch, which stores several times the estimate"

    def has_periods(self, config: Any) -> bool:
        return config.mamba_dt_rank is not None

    def toy_sizes(self, config: Any, toy: ToySizes) -> dict[str, Any]:
        return {} if config.mamba_layers is None else toy_mamba_sizes(config, toy)


def toy_mamba_sizes(config: Any, toy: ToySizes) -> dict[str, Any]:
    """Return sizes of mixers with enough heads and groups for every rank; transformers expands the width twice."""
    sizes = {
        "mamba_num_heads": 8,
        "mamba_head_dim": toy.hidden_size // 4,
        "mamba_state_dim": 16,
        "mamba_num_groups": max(2, toy.head_ranks) if config.mamba_num_groups > 1 else 1,
    }
    if config.mamba_dt_rank:
        sizes["mamba_dt_rank"] = 8
    return sizes


def _state_size(mixer: Any) -> int:
    """Return the states of a feature; Megatron-Core's ``d_state`` is this rank's part where heads share them."""
    return getattr(mixer, "state_size", mixer.d_state)
