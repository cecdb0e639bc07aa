# SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention and multi-token prediction layers: fields and weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.bridge.backends.attention.sparse_attention import takes_over
from megatron.bridge.backends.specs.layer_specs import moe_pattern
from megatron.bridge.models.conversion.declare.blocks import Block, SizedBlock, fused_norm
from megatron.bridge.models.conversion.declare.decoder_fields import DENSE, LLAMA_LIKE
from megatron.bridge.models.conversion.declare.fields import (
    Field,
    kind_indices,
    named,
    optional,
    read_by_others,
)
from megatron.bridge.models.conversion.declare.moe import DROPLESS, check_groups, leading_dense
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    MegatronParamMapping,
    ReplicatedMapping,
    SwappedInputMapping,
)
from megatron.bridge.utils.errors import UserError


def _rotated_width(width: Any, config: Mapping[str, Any]) -> int:
    """Return the rotated width of a head; keys that transformers derives from it must agree."""
    head_width = config["qk_nope_head_dim"] + width
    for key, derived in (("head_dim", width), ("qk_head_dim", head_width)):
        if config.get(key, derived) != derived:
            raise UserError(
                f"{key}={config[key]} does not agree with qk_nope_head_dim={config['qk_nope_head_dim']} and "
                f"qk_rope_head_dim={width}: remove it, or make it {derived}"
            )
    return width


def _width_of_rotation(provider: Any) -> int:
    return provider.qk_pos_emb_head_dim


_WIDTH_OF_QUERIES: dict[str, Callable[[Any], int]] = {
    "qk_head_dim": lambda provider: provider.qk_head_dim + provider.qk_pos_emb_head_dim
}
"""What transformers calls the width of a head's queries, for ``Field.derived``."""


def _every_head(groups: Any, config: Mapping[str, Any]) -> int:
    heads = config["num_attention_heads"]
    if groups not in (None, heads):
        raise UserError(
            f"num_key_value_heads={groups} is not num_attention_heads={heads}: in latent attention, each head has its "
            "own keys and values"
        )
    return heads


_METHODS = ("greedy", "group_limited_greedy")


def _expert_groups(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return (groups of experts, groups that a token may choose from), or (None, None) for all."""
    method = config.get("topk_method", "greedy")
    groups = config.get("n_group")
    chosen = config.get("topk_group")
    if method not in _METHODS:
        raise UserError(f"topk_method={method!r} is not supported: {' and '.join(_METHODS)} are")
    if method == "greedy" or groups == 1:
        return None, None
    if not groups or not chosen:
        raise UserError(
            f"topk_method={method!r} needs n_group and topk_group, but they are {groups} and {chosen}"
        )
    check_groups(groups, chosen, config)
    return groups, chosen


def _number_of_groups(_: Any, config: Mapping[str, Any]) -> int | None:
    return _expert_groups(config)[0]


def _or_one(count: int | None, _: Any) -> int:
    return count or 1


_KINDS = ("dense", "sparse")


def _listed_pattern(kinds: list[str], config: Mapping[str, Any]) -> list[int]:
    """Return 1 for each layer with experts, 0 for each without."""
    return kind_indices("mlp_layer_types", kinds, _KINDS, config)


def _sparse_pattern(kinds: list[str], config: Mapping[str, Any]) -> list[int]:
    pattern = _listed_pattern(kinds, config)
    dense = config.get("first_k_dense_replace")
    if dense is not None and pattern != [int(layer >= dense) for layer in range(len(pattern))]:
        raise UserError(
            f"first_k_dense_replace={dense} and mlp_layer_types name different layers: remove one"
        )
    return pattern


def _of_indexers(kinds: list[str] | None, config: Mapping[str, Any]) -> tuple[int, int]:
    """Return (period of layers with an indexer, the first of them) with Megatron-Core's meaning."""
    layer_kinds = kind_indices(
        "indexer_types", kinds or ["full"] * config["num_hidden_layers"], _INDEXERS, config
    )
    layers = range(1, len(layer_kinds) + 1)
    for offset in layers:
        for every in layers:
            if layer_kinds == [int(takes_over(layer, offset, every)) for layer in layers]:
                return every, offset
    raise UserError(
        f"indexer_types={kinds} is not supported: only 'full' layers at equal distances at the end are"
    )


_INDEXERS = ("full", "shared")


def _all_sparse(kinds: list[str] | None, config: Mapping[str, Any]) -> tuple[()]:
    kind_indices(
        "layer_types", kinds or [_INDEXED] * config["num_hidden_layers"], (_INDEXED,), config
    )
    return ()


_INDEXED = "indexed_attention"


_OWN = ("num_key_value_heads", "head_dim")  # fields of DENSE with another meaning here

LATENT: tuple[Field, ...] = (
    *(field for field in DENSE if field.hf not in _OWN),
    Field("num_key_value_heads", "num_query_groups", default=None, to=_every_head),
    Field("q_lora_rank", "q_lora_rank", default=None),
    Field("kv_lora_rank", "kv_lora_rank"),
    Field("qk_nope_head_dim", "qk_head_dim"),
    Field(
        "qk_rope_head_dim",
        "qk_pos_emb_head_dim",
        to=_rotated_width,
        derived={"head_dim": _width_of_rotation, **_WIDTH_OF_QUERIES},
    ),
    Field("v_head_dim", "v_head_dim"),
)
"""All settings of a decoder with latent attention, except its experts."""

NOT_ROTATED = Field(
    "qk_rope_head_dim",
    "qk_pos_emb_head_dim",
    to=lambda width, config: _rotated_width(width, {**config, "head_dim": width}),
    derived=_WIDTH_OF_QUERIES,
)
"""Width without rotation, in architectures without positions, in which ``head_dim`` has no effect."""

BEST_GROUPS: tuple[Field, ...] = (
    Field(
        "topk_method",
        "moe_router_num_groups",
        "greedy",
        _number_of_groups,
        lambda it, _: _METHODS[bool(it)],
    ),
    Field("n_group", "moe_router_num_groups", default=None, to=_number_of_groups, back=_or_one),
    Field(
        "topk_group",
        "moe_router_group_topk",
        default=None,
        to=lambda _, config: _expert_groups(config)[1],
        back=_or_one,
    ),
)
"""A token chooses among the experts of a few groups; groups are ranked by their best expert."""

BALANCING: tuple[Field, ...] = (
    Field("aux_loss_alpha", "moe_aux_loss_coeff", default=0.0),
    named(
        "seq_aux",
        "moe_router_load_balancing_type",
        {True: "seq_aux_loss", False: "aux_loss"},
        default=True,
    ),
)
"""Auxiliary loss, over each sequence or over the batch; transformers does not have it."""

SPARSE_LAYERS = Field(
    "mlp_layer_types",
    "moe_layer_freq",
    to=_sparse_pattern,
    back=lambda _, it: [_KINDS[kind] for kind in moe_pattern(it)],
)
"""Layers with experts, by name."""

SPARSE_AFTER_DENSE: tuple[Field, ...] = (
    replace(SPARSE_LAYERS, to=_listed_pattern),
    read_by_others("first_k_dense_replace", None, leading_dense),
)
"""Layers with experts, by name, or by the number of dense layers, which is read if the names are missing."""

NEXT_TOKENS = optional("num_nextn_predict_layers", "mtp_num_layers")
"""Layers of multi-token prediction, after the decoder's layers."""

INDEXER: tuple[Field, ...] = (
    Field("index_n_heads", "dsa_indexer_n_heads"),
    Field("index_head_dim", "dsa_indexer_head_dim"),
    Field("index_topk", "dsa_indexer_topk"),
    Field(
        "layer_types",
        (),
        default=None,
        to=_all_sparse,
        back=lambda _, model: [_INDEXED] * model.num_layers,
    ),
)
"""Sizes of the indexer of sparse attention in all layers."""

INDEXERS = Field(
    "indexer_types",
    ("dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset"),
    default=None,
    to=_of_indexers,
    back=lambda it, model: [
        _INDEXERS[takes_over(layer + 1, it[1], it[0])] for layer in range(model.num_layers)
    ],
)
"""Layers with an indexer; other layers attend to the keys that the last indexer before them chose."""

LATENT_LIKE: dict[str, Any] = {
    **LLAMA_LIKE,
    "qk_layernorm": True,
    "add_bias_linear": False,
    "rope_type": "rope",
    # transformers normalizes the latents with its default, independent of rms_norm_eps
    "latent_layernorm_epsilon": 1e-6,
}
"""Values that these architectures imply without a key."""

SPARSE_LIKE: dict[str, Any] = {
    **LATENT_LIKE,
    "experimental_attention_variant": "dsa",
    "dsa_indexer_k_norm_epsilon": 1e-6,
    # the same rotation of queries and keys, which eases quantization and does not change scores
    "dsa_indexer_rotate_activation": False,
}
"""Values that architectures with sparse attention imply without a key."""

PLAIN_SOFTMAX_ROUTING: dict[str, Any] = {
    **DROPLESS,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": True,
    "moe_router_dtype": "fp32",
    "moe_router_group_score": "max",
}
"""Weights are a softmax over all experts, in fp32 from the logits on."""

ONLY_SIGMOIDS: dict[str, tuple[Any, ...]] = {
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}
"""Keys that describe ``SIGMOID_ROUTING``."""

UNSPOKEN: dict[str, tuple[Any, ...] | None] = {
    "attention_bias": (False,),
    "ep_size": None,
    "head_dim": None,  # checked by LATENT
    "qk_head_dim": None,
    "moe_layer_freq": (1,),
    "mlp_bias": (False,),
    "rope_interleave": (True,),
}
"""Keys of these architectures without effect, with the given values."""


_PROJECTIONS = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
}


def latent_attention(layers: str = "model.layers.*", norm: str = "input_layernorm") -> Block:
    """Multi-latent attention, with or without a query latent, and the normalization before it."""
    megatron_name = "decoder.layers.*.self_attention"
    hf_name = f"{layers}.self_attn"
    return (
        *(
            AutoMapping(f"{megatron_name}.{megatron_part}.weight", f"{hf_name}.{hf}.weight")
            for megatron_part, hf in _PROJECTIONS.items()
        ),
        *fused_norm(
            f"{megatron_name}.q_layernorm",
            f"{megatron_name}.linear_q_up_proj",
            f"{hf_name}.q_a_layernorm",
        ),
        *fused_norm(
            f"{megatron_name}.kv_layernorm",
            f"{megatron_name}.linear_kv_up_proj",
            f"{hf_name}.kv_a_layernorm",
        ),
        ReplicatedMapping("decoder.layers.*.input_layernorm.weight", f"{layers}.{norm}.weight"),
    )


def indexer(layers: str = "model.layers.*") -> Block:
    """The indexer of sparse attention, which selects the keys that a query attends to."""
    megatron_name = "decoder.layers.*.self_attention.core_attention.indexer"
    hf_name = f"{layers}.self_attn.indexer"
    return tuple(
        ReplicatedMapping(f"{megatron_name}.{prefix}{name}", f"{hf_name}.{name}")
        for prefix, name in (
            ("linear_", "wq_b.weight"),
            ("linear_", "wk.weight"),
            ("", "k_norm.weight"),
            ("", "k_norm.bias"),
            ("linear_", "weights_proj.weight"),
        )
    )


@dataclass(frozen=True)
class MTPNames:
    """Hugging Face names of one multi-token prediction layer: prefixes without ``.weight``."""

    layer: str  # replaces the name of a decoder layer
    enorm: str  # norm of the next token's embedding
    hnorm: str  # norm of the current token's hidden state
    eh_proj: str  # projection of both, concatenated
    norm: str
    hidden_first: bool = field(
        default=False, kw_only=True
    )  # whether the hidden state comes first in the concatenation


def after_decoder_layers(config: Any, depth: int) -> MTPNames:
    """Return the names of layers that are numbered after the decoder's layers."""
    layer = f"model.layers.{config.num_layers + depth}"
    module_names = (f"{layer}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
    return MTPNames(layer, *module_names)


def mtp(
    *layer: Block,
    layers: str = "model.layers.*",
    names: Callable[[Any, int], MTPNames] = after_decoder_layers,
) -> SizedBlock:
    """Multi-token prediction layers.

    Each layer normalizes the embedding of the next token and the hidden state of the current one and projects both. A
    decoder layer and a final norm follow, then the model's own output layer.

    ``layer`` has the blocks of a decoder layer under the decoder's names. ``names`` returns the layer's names for a
    config and a depth.
    """

    def of(config: Any) -> Block:
        depths = range(config.mtp_num_layers or 0)
        return tuple(
            mapping
            for depth in depths
            for mapping in _mtp_depth(layer, depth, layers, names(config, depth))
        )

    return of


def _mtp_depth(layer: tuple[Block, ...], depth: int, layers: str, hf_names: MTPNames) -> Block:
    megatron_name = f"mtp.layers.{depth}"
    projection = SwappedInputMapping if hf_names.hidden_first else AutoMapping
    mtp_modules: Block = (
        ReplicatedMapping(f"{megatron_name}.enorm.weight", f"{hf_names.enorm}.weight"),
        ReplicatedMapping(f"{megatron_name}.hnorm.weight", f"{hf_names.hnorm}.weight"),
        projection(f"{megatron_name}.eh_proj.weight", f"{hf_names.eh_proj}.weight"),
        ReplicatedMapping(f"{megatron_name}.final_layernorm.weight", f"{hf_names.norm}.weight"),
    )

    def moved(mapping: MegatronParamMapping) -> MegatronParamMapping:
        return mapping.renamed(
            lambda name: name.replace("decoder.layers.*", f"{megatron_name}.mtp_model_layer", 1),
            lambda name: name.replace(layers, hf_names.layer, 1),
        )

    return (*mtp_modules, *(moved(mapping) for block in layer for mapping in block))


def mtp_copies(
    layers: str = "model.layers.*", embedding: str = "model.embed_tokens.weight"
) -> dict[str, str]:
    """Return the tensors that checkpoints also store in each multi-token prediction layer, and their originals."""
    return {
        f"{layers}.embed_tokens.weight": embedding,
        f"{layers}.shared_head.head.weight": "lm_head.weight",
    }
