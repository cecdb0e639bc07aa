# SPDX-License-Identifier: Apache-2.0
"""Configs of models that are remote code on the hub: read here without running it."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, LlamaConfig, Qwen2Config
from transformers.configuration_utils import SubConfigSpec
from transformers.models.nemotron_h_omni.configuration_nemotron_h_omni import (
    NemotronH_Omni_Reasoning_V3_Config,
)

_HUGE = "vit_huge_patch16_224"  # the sizes of which are the defaults of transformers' RadioConfig


@strict
class DeciConfig(LlamaConfig):
    """Of Llama-Nemotron models: Llama's config with attention and feed-forward layers described one by one."""

    model_type = "nemotron-nas"

    intermediate_size: int | None = None  # type: ignore[assignment]
    num_key_value_heads: int | None = None
    block_configs: list[dict[str, Any]] | None = (
        None  # for each layer its ``attention`` and its ``ffn``
    )

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in defaults, but for what differs from layer to layer."""
        super().__post_init__(**kwargs)
        self.num_key_value_heads = None


@strict
class MiMoConfig(Qwen2Config):
    """Qwen2's config with layers of multi-token prediction."""

    model_type = "mimo"

    num_nextn_predict_layers: int = 0


@strict
class NanoVLConfig(NemotronH_Omni_Reasoning_V3_Config):
    """Of Nemotron Nano VL v2: Nemotron Omni's without videos; images are tiles of ``force_image_size`` pixels."""

    model_type = "NemotronH_Nano_VL_V2"
    sub_configs_defaults: ClassVar[dict[str, Any]] = {
        **NemotronH_Omni_Reasoning_V3_Config.sub_configs_defaults,
        "vision_config": SubConfigSpec(config_class=AutoConfig, model_type="radio"),
    }
    _legacy_field_names: ClassVar[dict[str, str]] = {
        **NemotronH_Omni_Reasoning_V3_Config._legacy_field_names,
        "image_context_token_id": "image_token_id",
    }

    video_temporal_patch_size: int | None = None  # type: ignore[assignment]

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.vision_config, dict):
            self.vision_config = {**_trained_sizes(self.vision_config), **self.vision_config}
        super().__post_init__(**kwargs)


def _trained_sizes(vision: dict[str, Any]) -> dict[str, Any]:
    """What ``args``, the settings that the tower was trained with, say of its sizes."""
    args: dict[str, Any] = vision.get("args") or {}
    if "hidden_size" not in vision and args.get("model", _HUGE) != _HUGE:
        raise ValueError(f"vision_config.args.model={args['model']!r} is not supported: {_HUGE} is")
    sizes = {"max_img_size": args["cpe_max_size"]} if args.get("cpe_max_size") else {}
    if multiple := args.get("register_multiple"):
        teachers = {teacher["name"] for teacher in args.get("teachers", ())}
        tokens = len(teachers) if args.get("cls_token_per_teacher") else 1
        sizes |= {"num_cls_tokens": tokens, "num_registers": multiple - tokens % multiple}
    return sizes
