# SPDX-License-Identifier: Apache-2.0
"""Fields and blocks of Gemma 4: two head widths, KV sharing, per-layer embeddings, experts parallel to an MLP."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from megatron.bridge.backends.specs.kv_sharing import has_window, projections
from megatron.bridge.models.conversion.declare.blocks import Block, attention
from megatron.bridge.models.conversion.declare.decoder_fields import LAYER_ROPE
from megatron.bridge.models.conversion.declare.fields import Field, optional, read_by_others
from megatron.bridge.models.conversion.declare.moe import DROPLESS, stacked_experts
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    GatedMLPMapping,
    HFRange,
    QKVMapping,
    ReplicatedMapping,
    ShardSpec,
)
from megatron.bridge.utils.errors import UserError

_FULL = "full_attention"
_WIDTHS = ("head_dim", "num_key_value_heads")


def _read_ropes(parameters: Mapping[str, Any] | None, config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Read rotary embeddings as in Gemma 3, except that ``proportional`` applies ``partial_rotary_factor`` itself."""
    assert LAYER_ROPE.to is not None
    ropes = parameters or {}
    scaling, base, share, local = LAYER_ROPE.to(
        {kind: _without_partial_share(rope) for kind, rope in ropes.items()}, config
    )
    return (
        _own_share(scaling, ropes[_FULL]),
        base,
        share,
        _own_share(local, ropes["sliding_attention"]),
    )


def _without_partial_share(rope: Mapping[str, Any]) -> dict[str, Any]:
    turns = rope.get("rope_type") == "proportional"
    return {
        key: value for key, value in rope.items() if not (turns and key == "partial_rotary_factor")
    }


def _own_share(read: Any, rope: Mapping[str, Any]) -> Any:
    lost = {key: value for key, value in rope.items() if key not in _without_partial_share(rope)}
    return {**read, **lost} if lost else read


def _read_full_layers(
    layers: Mapping[Any, Mapping[str, Any]] | None, config: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return head width and number of key heads of the layers without a window."""
    full = [index for index, kind in enumerate(config["layer_types"]) if kind == _FULL]
    layer_values = {int(layer): values for layer, values in (layers or {}).items()}
    if layer_values and sorted(layer_values) != full:
        raise UserError(
            f"per_layer_config={layer_values} must describe the layers without a window, which are {full} "
            "in layer_types"
        )
    first = next(iter(layer_values.values()), cast(Mapping[str, Any], {}))
    if any(
        values_of_layer != first or set(values_of_layer) - set(_WIDTHS)
        for values_of_layer in layer_values.values()
    ):
        raise UserError(
            f"per_layer_config={layer_values} must have the same {' and '.join(_WIDTHS)} for each layer"
        )
    return first.get(_WIDTHS[0]), first.get(_WIDTHS[1])


def _unlike_back(values: tuple[Any, ...], provider: Any) -> dict[str, dict[str, Any]]:
    layer_values = {
        name: value for name, value in zip(_WIDTHS, values, strict=True) if value is not None
    }
    full = [
        layer
        for layer in range(provider.num_layers)
        if layer_values and not has_window(provider, layer + 1)
    ]
    return {
        str(layer).zfill(len(str(full[-1]))): layer_values for layer in full
    }  # the format of transformers


def _sharing_pattern(count: int, config: Mapping[str, Any]) -> list[int] | None:
    layers = config["num_hidden_layers"]
    kinds = config["layer_types"]
    if not 0 <= count < layers or set(kinds[: layers - count]) != set(kinds):
        raise UserError(
            f"num_kv_shared_layers={count} must leave layers of each kind with their own keys"
        )
    has_no_inputs = not config.get("hidden_size_per_layer_input", 256)
    if count and has_no_inputs and config.get("model_type") == "gemma4_text":
        raise UserError(
            f"num_kv_shared_layers={count} needs per-layer embeddings, without which transformers fails: set "
            "hidden_size_per_layer_input, or num_kv_shared_layers=0"
        )
    return [0] * (layers - count) + [1] * count if count else None


_EXPERTS = {
    "num_experts": "num_moe_experts",
    "top_k_experts": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
}
# values of dense models, and of models with experts, which have no load balancing
_DENSE: dict[str, Any] = {
    "experts_beside_mlp": False,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "allgather",
}
_SPARSE = {**DROPLESS, "experts_beside_mlp": True, "moe_router_load_balancing_type": "none"}


def _read_experts(has_some: bool, config: Mapping[str, Any]) -> tuple[Any, ...]:
    if not has_some:
        return None, 2, None, *_DENSE.values()
    expert_values = [config.get(key) for key in _EXPERTS]
    if None in expert_values:
        raise UserError(f"enable_moe_block=True needs {', '.join(_EXPERTS)}")
    if not 1 < cast(int, expert_values[1]) <= cast(int, expert_values[0]):
        raise UserError(
            f"top_k_experts={expert_values[1]} must be from 2 to num_experts={expert_values[0]}"
        )
    return *expert_values, *(_SPARSE[name] for name in _DENSE)


SHARED_KV: tuple[Field, ...] = (
    replace(LAYER_ROPE, to=_read_ropes),
    Field(
        "per_layer_config",
        ("global_kv_channels", "global_query_groups"),
        None,
        _read_full_layers,
        _unlike_back,
    ),
    Field("attention_k_eq_v", "attention_k_eq_v", default=False),
    Field(
        "num_kv_shared_layers",
        "shared_kv_layers",
        default=0,
        to=_sharing_pattern,
        back=lambda layers, _: sum(layers or ()),
    ),
    Field("use_double_wide_mlp", "shared_kv_wide_mlp", default=False),
)
"""KV sharing, keys that serve as values, and a different head width in layers without a window."""

PER_LAYER_INPUTS: tuple[Field, ...] = (
    optional("hidden_size_per_layer_input", "hidden_size_per_layer_input", default=256),
    Field(
        "vocab_size_per_layer_input",
        "vocab_size_per_layer_input",
        262_144,
        lambda size, config: size if config.get("hidden_size_per_layer_input", 256) else None,
        lambda it, _: it or 262_144,
    ),
)
"""Per-layer embeddings (PLE): one more embedding of each token for each layer."""

EXPERTS_BESIDE: tuple[Field, ...] = (
    Field(
        "enable_moe_block",
        (*_EXPERTS.values(), *_DENSE),
        default=False,
        to=_read_experts,
        back=lambda values, _: values[len(_EXPERTS)],
    ),
    *(
        read_by_others(
            key, None, lambda it, name=name: getattr(it, name) if it.experts_beside_mlp else None
        )
        for key, name in _EXPERTS.items()
    ),
)
"""Experts parallel to the feed-forward layer, if ``enable_moe_block`` is set."""


_KEYS_AND_VALUES = re.compile(r"\blayers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\.")


def unused_keys_and_values(config: Any, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of ``names`` that belong to projections of layers with shared keys and values.

    Published checkpoints (E2B, E4B) have these tensors, which transformers does not load.
    """
    shared: list[int] = config.shared_kv_layers or []
    layer_of = {name: int(found[1]) for name in names if (found := _KEYS_AND_VALUES.search(name))}
    return tuple(name for name, layer in layer_of.items() if layer < len(shared) and shared[layer])


class PerLayerVocabularyMapping(AutoMapping):
    """The per-layer embedding table without padding rows."""

    def blocks(self, shard: ShardSpec) -> Iterator[HFRange]:
        assert isinstance(self.hf_param, str)
        yield HFRange(self.hf_param, 0, shard.config.vocab_size_per_layer_input)


def shared_kv_attention(config: Any) -> Block:
    """Attention whose layers may lack the projection of values, or of keys and values; and its norm."""
    common = (
        mapping
        for mapping in attention(qk_norm=True)
        if ".linear_qkv.weight" not in mapping.megatron_param
    )
    mappings = [mapping for mapping in common if ".linear_qkv.bias" not in mapping.megatron_param]
    for layer in range(config.num_layers):
        for name in ("weight", "bias"):
            hf_names = {
                role: f"model.layers.{layer}.self_attn.{role}_proj.{name}"
                for role in projections(config, layer + 1)
            }
            megatron_name = f"decoder.layers.{layer}.self_attention.linear_qkv.{name}"
            mappings.append(QKVMapping(megatron_name, **hf_names))
    return tuple(mappings)


def layer_ends(layers: str = "model.layers.*") -> Block:
    """Per-layer embeddings, and the scalars that multiply the outputs of layers."""
    megatron_layers = "decoder.layers.*"
    gate = "decoder.layers.*.per_layer_gate"
    inputs = "per_layer_inputs"
    names = {
        f"{inputs}.projection.weight": "model.per_layer_model_projection.weight",
        f"{inputs}.norm.weight": "model.per_layer_projection_norm.weight",
        f"{gate}.gate.weight": f"{layers}.per_layer_input_gate.weight",
        f"{gate}.projection.weight": f"{layers}.per_layer_projection.weight",
        f"{gate}.norm.weight": f"{layers}.post_per_layer_input_norm.weight",
        f"{megatron_layers}.layer_scale": f"{layers}.layer_scalar",
    }
    table = PerLayerVocabularyMapping(
        f"{inputs}.word_embeddings.weight", "model.embed_tokens_per_layer.weight"
    )
    return (table, *(ReplicatedMapping(*pair) for pair in names.items()))


def experts_beside(layers: str = "model.layers.*") -> Block:
    """Experts and the parallel feed-forward layer, the norms of both, and the router."""
    megatron_name = "decoder.layers.*.mlp"
    names = {
        "router.weight": "router.proj.weight",
        "router.scale": "router.scale",
        "router.expert_scale": "router.per_expert_scale",
        "dense_norm.weight": "pre_feedforward_layernorm.weight",
        "dense_output_norm.weight": "post_feedforward_layernorm_1.weight",
        "expert_norm.weight": "pre_feedforward_layernorm_2.weight",
        "expert_output_norm.weight": "post_feedforward_layernorm_2.weight",
    }
    dense = {role: f"{layers}.mlp.{role}_proj.weight" for role in ("gate", "up")}
    return (
        GatedMLPMapping(f"{megatron_name}.dense.linear_fc1.weight", **dense),
        AutoMapping(f"{megatron_name}.dense.linear_fc2.weight", f"{layers}.mlp.down_proj.weight"),
        *(
            ReplicatedMapping(f"{megatron_name}.{megatron_norm}", f"{layers}.{hf_norm}")
            for megatron_norm, hf_norm in names.items()
        ),
        *stacked_experts("experts"),
    )
