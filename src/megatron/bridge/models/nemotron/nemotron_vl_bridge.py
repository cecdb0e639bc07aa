# SPDX-License-Identifier: Apache-2.0
"""Nemotron with images: RADIO in front of Nemotron-H."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.bridge.models.conversion.declare.fields import HarmlessKeys
from megatron.bridge.models.conversion.declare.vision import VisionBridge, renamed
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import register_bridge
from megatron.bridge.models.conversion.param_mapping import HFRange, ReplicatedMapping, ShardSpec
from megatron.bridge.models.hf_pretrained.safetensors_files import TensorEntry
from megatron.bridge.models.vision.provider import VisionHybridModelProvider
from megatron.bridge.utils.errors import UserError

_LANGUAGE = "language_model.backbone."
_AUDIO = ("sound_encoder.**", "sound_projection.**")

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
    **{f"{_RADIO}.{part}": f"{_STORED}.blocks.*.{part}" for part in ("layer_scale1", "layer_scale2")},
}
_PARAMETERS = {
    "vision_model.embeddings.position_embedding": f"{_STORED}.patch_generator.pos_embed",
    "vision_model.embeddings.cls_register_token": f"{_STORED}.patch_generator.cls_token.token",
}
_WEIGHTS = (
    *(ReplicatedMapping(f"vision.{ours}.**", f"{theirs}.**") for ours, theirs in _TENSORS.items()),
    *(ReplicatedMapping(f"vision.{ours}", theirs) for ours, theirs in _PARAMETERS.items()),
)
_BUFFERS = ("vision_model.radio_model.input_conditioner.**", "vision_model.radio_model.summary_idxs")

_OF_REMOTE_CODE: HarmlessKeys = {
    **dict.fromkeys(("img_context_token", "img_start_token", "img_end_token", "video_context_token")),
    **dict.fromkeys(("sound_context_token", "image_tag_type", "template", "norm_mean", "norm_std", "patch_size")),
    **dict.fromkeys(("max_sequence_length", "use_thumbnail", "min_num_patches", "max_num_patches", "version")),
    **dict.fromkeys(("args", "adaptor_configs", "max_resolution", "preferred_resolution")),
    **dict.fromkeys(("adaptor_names", "feature_normalizer_config", "inter_feature_normalizer_config"), (None,)),
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


@register_bridge("NemotronH_Omni_Reasoning_V3", provider=VisionHybridModelProvider, model_type="nemotron_h_omni")
class NemotronHOmniBridge(VisionBridge):
    """Nemotron 3 Nano Omni: RADIO in front of Nemotron-H; its audio part is carried along."""

    texts = {"nemotron_h": "NemotronHForCausalLM"}
    tower = ()
    names = {"backbone.": _LANGUAGE, "lm_head.": "language_model.lm_head."}
    irrelevant = _OF_REMOTE_CODE
    buffers = (*VisionBridge.buffers, *_BUFFERS)
    extra_weights = _WEIGHTS

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        provider = super().provider_bridge(hf_pretrained)
        stored = getattr(hf_pretrained, "stored_names", None) or ()
        provider.radio_layer_scales = any(".layer_scale1." in name for name in stored)
        return provider

    def carried_by(self, config: Any, entries: Mapping[str, TensorEntry]) -> tuple[str, ...]:
        """Audio, and the tower of a text model that is built without it."""
        if config.vision is not None:
            return _AUDIO if config.vision.get("audio_config") else ()
        audio = _AUDIO if any(name.startswith("sound_") for name in entries) else ()
        return ("mlp1.**", "vision_model.**", *audio)

    def as_modules(self, registry: MegatronMappingRegistry) -> MegatronMappingRegistry:
        """``registry`` under the names of transformers' modules."""
        modules = {**{theirs: ours for ours, theirs in _TENSORS.items()}, _LANGUAGE: "language_model.model."}
        found = renamed(registry.get_all_mappings(), modules).get_all_mappings()
        qkv = _ThreeProjections(f"vision.{_QKV}.**", *(f"{_RADIO}.attention.{name}_proj.**" for name in "qkv"))
        return MegatronMappingRegistry(*(it for it in found if it.megatron_param != qkv.megatron_param), qkv)


@register_bridge("NemotronH_Nano_VL_V2", provider=VisionHybridModelProvider, model_type="NemotronH_Nano_VL_V2")
class NemotronNanoVLBridge(NemotronHOmniBridge):
    """Nemotron Nano VL v2 12B: RADIO in front of Nemotron Nano v2; images are tiles of one size."""

    irrelevant = {**_OF_REMOTE_CODE, "layers_block_type": None, "tie_word_embeddings": (False,)}
    other_names = {"language_model.model.": {**NemotronHOmniBridge.names, "backbone.": "language_model.model."}}

    def _check(self, whole: Mapping[str, Any]) -> None:
        super()._check(whole)
        if (version := whole.get("ps_version", "v1")) != "v2":
            raise UserError(f"ps_version={version!r}, which transposes tiles, is not supported: v2 is")

    def as_modules(self, registry: MegatronMappingRegistry) -> MegatronMappingRegistry:
        """Modules of the remote code are called as its tensors."""
        return registry
