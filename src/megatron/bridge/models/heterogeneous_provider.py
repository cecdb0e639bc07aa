# SPDX-License-Identifier: Apache-2.0
"""The provider of decoders whose layers differ in size, or lack attention or feed-forward layer."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from megatron.core.transformer.heterogeneous.heterogeneous_config import (
    AttentionConfig,
    MLPConfig,
    TransformerBlockConfig,
)

from megatron.bridge.backends.specs import layer_features
from megatron.bridge.models.features.feature import ToySizes
from megatron.bridge.models.features.registry import plain_layer_values
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.utils.errors import UserError, did_you_mean

# fields of models whose layers are alike -> the value with which they change nothing
_WITHOUT_EFFECT: dict[str, Any] = {
    "num_query_groups": None,
    "ffn_hidden_size": None,
    "num_moe_experts": None,
    "mtp_num_layers": None,
    "make_query_groups_divisible_by": 1,
    "multi_latent_attention": False,
    "experimental_attention_variant": None,
    **layer_features.OFF,
    **plain_layer_values(),
}
_KINDS = ("no_op", "replace_with_linear")


@dataclass
class HeterogeneousModelProvider(GPTModelProvider):
    """A ``GPTModelProvider`` whose layers are described one by one."""

    block_configs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """For each layer a dict as in ``config.json`` of Llama-Nemotron models: ``attention`` with
    ``n_heads_in_group`` (query heads that share a key and a value), ``ffn`` with ``ffn_mult`` (the feed-forward
    layer's width is 2/3 of this times the hidden size, rounded up to a multiple of 256), and in either ``no_op``
    (it is left out) and ``replace_with_linear`` (it is one linear layer)."""
    heterogeneous_block_specs: bool = True
    deallocate_pipeline_outputs: bool = False
    """A stage whose last block was left out sends a tensor that its backward pass reads."""

    @property
    def per_block_parameters(self) -> list[TransformerBlockConfig]:
        """The layers as Megatron-Core describes them."""
        return [self._block(index, block) for index, block in enumerate(self.block_configs)]

    def get_config_for_layer(self, layer_number: int) -> Self:
        """The config that layer ``layer_number``, counted from one, is built with."""
        index = layer_number - 1
        block = self._block(index, self.block_configs[index])
        config = copy.copy(self)
        if block.attention.num_query_groups is not None:
            config.num_query_groups = block.attention.num_query_groups
            config._unpadded_heads = (self.num_attention_heads, config.num_query_groups)
        if block.mlp.ffn_hidden_size is not None:
            config.ffn_hidden_size = int(block.mlp.ffn_hidden_size)
        return config

    def derive(self) -> None:
        """Refuse layers that cannot be built, and fields that say the same of all layers."""
        self._refuse_ineffective(_WITHOUT_EFFECT, "with block_configs")
        super().derive()
        if len(self.block_configs) != self.num_layers:
            raise UserError(
                f"block_configs has {len(self.block_configs)} layers, num_layers={self.num_layers}: describe each"
            )
        for index, block in enumerate(self.per_block_parameters):
            self._check_parallel(index, block)

    @property
    def per_layer_fields(self) -> tuple[str, ...]:
        """Those of a decoder, and the description of each layer."""
        return (*super().per_layer_fields, "block_configs")

    def toy_sizes(self, toy: ToySizes) -> dict[str, Any]:
        """Add fewer query heads for each key; feed-forward sizes are multiples of the hidden size."""
        sharing = {None: None, 1: 1, self.num_attention_heads: toy.query_heads}
        blocks: list[dict[str, Any]] = []
        for block in self.block_configs:
            heads_per_key = block["attention"].get("n_heads_in_group")
            attention = block["attention"] | {"n_heads_in_group": sharing.get(heads_per_key, 2)}
            blocks.append(block | {"attention": attention})
        return super().toy_sizes(toy) | {"block_configs": blocks}

    def _block(self, index: int, block: Mapping[str, Any]) -> TransformerBlockConfig:
        location = f"block_configs[{index}]"
        if set(block) != {"attention", "ffn"}:
            raise UserError(
                f"{location} has the keys {', '.join(sorted(block))}: it must have attention and ffn"
            )
        sizes = {
            part: _size_of_part(f"{location}.{part}", block[part], key)
            for part, key in (("attention", "n_heads_in_group"), ("ffn", "ffn_mult"))
        }
        heads = sizes["attention"]
        mult = sizes["ffn"]
        if heads is not None and (heads < 1 or self.num_attention_heads % heads):
            raise UserError(
                f"{location}.attention.n_heads_in_group={heads} does not divide num_attention_heads="
                f"{self.num_attention_heads}"
            )
        width = (
            None
            if mult is None
            else MLPConfig.ffn_mult_to_intermediate_size(mult, self.hidden_size)
        )
        kinds = {part: {kind: bool(block[part].get(kind)) for kind in _KINDS} for part in sizes}
        groups = None if heads is None else self.num_attention_heads // heads
        return TransformerBlockConfig(
            AttentionConfig(**kinds["attention"], num_query_groups=groups),
            MLPConfig(**kinds["ffn"], ffn_hidden_size=width),
        )

    def _check_parallel(self, index: int, block: TransformerBlockConfig) -> None:
        linear = block.attention.replace_with_linear or block.mlp.replace_with_linear
        if linear and self.backend == "transformer_engine" and self.sequence_parallel:
            raise UserError(
                f"block_configs[{index}] has replace_with_linear, which fails under sequence_parallel with "
                "backend='transformer_engine': set model.backend='torch', or model.sequence_parallel=False"
            )
        ranks = self.tensor_model_parallel_size
        groups = block.attention.num_query_groups
        if groups is not None and groups % ranks and ranks % groups:
            raise UserError(
                f"tensor_model_parallel_size={ranks} neither divides nor is a multiple of the {groups} groups of "
                f"keys and values of block_configs[{index}]"
            )


def _size_of_part(location: str, part: Mapping[str, Any], key: str) -> Any:
    """The size that ``key`` gives; None where there is nothing to have one."""
    for part_key, value in part.items():
        if part_key not in (key, *_KINDS) and value not in (None, False):
            hint = did_you_mean(part_key, (key, *_KINDS))
            raise UserError(
                f"{location}.{part_key}={value!r} is not supported{hint or ': remove it'}"
            )
    if part.get("no_op") and part.get("replace_with_linear"):
        raise UserError(f"{location} has no_op and replace_with_linear: it can be one of them")
    size = part.get(key)
    if (size is None) != bool(part.get("no_op") or part.get("replace_with_linear")):
        raise UserError(
            f"{location}.{key}={size!r} does not fit no_op and replace_with_linear: give one of them"
        )
    return size
