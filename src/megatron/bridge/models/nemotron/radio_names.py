# SPDX-License-Identifier: Apache-2.0
"""RADIO in front of Nemotron-H: the names that checkpoints have for it, and keys that only remote code reads."""

from collections.abc import Iterator

from megatron.bridge.models.conversion.declare.fields import HarmlessKeys
from megatron.bridge.models.conversion.declare.vision import renamed
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.param_mapping import HFRange, ReplicatedMapping, ShardSpec

LANGUAGE = "language_model.backbone."
AUDIO = ("sound_encoder.**", "sound_projection.**")

_RADIO, _STORED = "vision_model.encoder.layer.*", "vision_model.radio_model.model"
_QKV = f"{_RADIO}.attention.qkv"
_TENSORS = {  # of transformers' modules
    "multi_modal_projector.layer_norm": "mlp1.0",
    "multi_modal_projector.linear_1": "mlp1.1",
    "multi_modal_projector.linear_2": "mlp1.3",
    "vision_model.embeddings.patch_projection": f"{_STORED}.patch_generator.embedder",
    "vision_model.embeddings.video_patch_projection": f"{_STORED}.patch_generator.video_embedder",
    _QKV: f"{_STORED}.blocks.*.attn.qkv",
    f"{_RADIO}.attention.o_proj": f"{_STORED}.blocks.*.attn.proj",
    **{f"{_RADIO}.{part}": f"{_STORED}.blocks.*.{part}" for part in ("norm1", "norm2", "mlp")},
    **{
        f"{_RADIO}.{part}": f"{_STORED}.blocks.*.{part}"
        for part in ("layer_scale1", "layer_scale2")
    },
}
_PARAMETERS = {
    "vision_model.embeddings.position_embedding": f"{_STORED}.patch_generator.pos_embed",
    "vision_model.embeddings.cls_register_token": f"{_STORED}.patch_generator.cls_token.token",
}
WEIGHTS = (
    *(ReplicatedMapping(f"vision.{ours}.**", f"{theirs}.**") for ours, theirs in _TENSORS.items()),
    *(ReplicatedMapping(f"vision.{ours}", theirs) for ours, theirs in _PARAMETERS.items()),
)
BUFFERS = ("vision_model.radio_model.input_conditioner.**", "vision_model.radio_model.summary_idxs")

OF_REMOTE_CODE: HarmlessKeys = {
    **dict.fromkeys(
        ("img_context_token", "img_start_token", "img_end_token", "video_context_token")
    ),
    **dict.fromkeys(
        ("sound_context_token", "image_tag_type", "template", "norm_mean", "norm_std", "patch_size")
    ),
    **dict.fromkeys(
        ("max_sequence_length", "use_thumbnail", "min_num_patches", "max_num_patches", "version")
    ),
    **dict.fromkeys(("args", "adaptor_configs", "max_resolution", "preferred_resolution")),
    **dict.fromkeys(
        ("adaptor_names", "feature_normalizer_config", "inter_feature_normalizer_config"), (None,)
    ),
    "ps_version": ("v2",),
    "separate_video_embedder": (True,),
    "vitdet_window_size": (None,),
}
"""Of released configs."""


class _ThreeProjections(ReplicatedMapping):
    """The matrix of queries, keys and values as transformers' modules have it."""

    def __init__(self, megatron_param: str, q: str, k: str, v: str) -> None:
        super().__init__(megatron_param, {"q": q, "k": k, "v": v})

    def blocks(self, shard: ShardSpec) -> Iterator[HFRange]:
        yield from (HFRange(name, 0, shard.local // 3) for name in self.hf_names)


def as_modules(registry: MegatronMappingRegistry) -> MegatronMappingRegistry:
    """``registry`` under the names of transformers' modules."""
    modules = {
        **{hf_name: megatron_name for megatron_name, hf_name in _TENSORS.items()},
        LANGUAGE: "language_model.model.",
    }
    mappings = renamed(registry.get_all_mappings(), modules).get_all_mappings()
    qkv = _ThreeProjections(
        f"vision.{_QKV}.**", *(f"{_RADIO}.attention.{name}_proj.**" for name in "qkv")
    )
    return MegatronMappingRegistry(
        *(mapping for mapping in mappings if mapping.megatron_param != qkv.megatron_param), qkv
    )
