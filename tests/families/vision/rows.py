# SPDX-License-Identifier: Apache-2.0
"""The rows of all vision-language families: tiny, with images of several sizes."""

from tests.families.vision.row import VisionRow
from tests.families.vision.samples import (
    AUDIO_TOKEN,
    IMAGE_TOKEN,
    VIDEO_TOKEN,
    encoded_video,
    frames,
    packed_patches,
    padded_patches,
    patches,
    pixtral,
    recording,
    some_tiles,
    stretches,
    tiles,
    video,
    video_as_images,
    video_by_frames,
    video_of_patches,
    whole_images,
)

TEXT = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TOKENS = {"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN}
ALL = ("tp2", "sp2", "unshared", "pp2", "vp2", "cp2", "dp2")


def rope(**more):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, **more}}


CHUNKED = rope(mrope_section=[1, 1, 2])

FIRST = (
    VisionRow(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": {**TEXT, **CHUNKED},
            "vision_config": {
                "depth": 2,
                "embed_dim": 16,
                "hidden_size": 32,
                "num_heads": 2,
                "mlp_ratio": 2,
                "patch_size": 4,
            },
            **TOKENS,
        },
        image=patches,
        video=video,
        mrope={"merge": 2},
        types_as="mm_token_type_ids",
        layouts=("tp2", "pp2"),
    ),
    VisionRow(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {**TEXT, **CHUNKED},
            "vision_config": {
                "depth": 2,
                "hidden_size": 16,
                "out_hidden_size": 32,
                "num_heads": 2,
                "intermediate_size": 24,
                "patch_size": 4,
                "window_size": 16,
                "fullatt_block_indexes": [1],
                "tokens_per_second": 3,
            },
            "tie_word_embeddings": True,
            **TOKENS,
        },
        image=patches,
        video=video,
        mrope={"merge": 2, "time_step": 3.0},
        types_as="mm_token_type_ids",
        layouts=ALL,
        four=("tp2cp2", "tp2pp2"),
    ),
)

MROPE_TYPES = {"types_as": "mm_token_type_ids"}
QWEN3_TOWER = {
    "depth": 3,
    "hidden_size": 16,
    "out_hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 24,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}
PLAIN_QWEN3_TOWER = {
    key: value for key, value in QWEN3_TOWER.items() if key != "deepstack_visual_indexes"
}
DELTA_NETS = {
    **rope(mrope_section=[2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.5),
    "head_dim": 16,
    # what a state recalls is small, and its norm would make noise of float32 grow, in transformers as well
    "rms_norm_eps": 1e-2,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
INTERLEAVED = rope(mrope_section=[2, 1, 1], mrope_interleaved=True)
GLM_TOWER = {
    "depth": 2,
    "hidden_size": 16,
    "out_hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 24,
    "patch_size": 4,
    "image_size": 16,
}
GLM_ROPE = rope(mrope_section=[1, 0, 1], partial_rotary_factor=0.5)
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
RADIO = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "max_img_size": 32,
    "num_cls_tokens": 2,
    "num_registers": 1,
    "video_temporal_patch_size": 2,
}
NEMOTRON_H = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
    "max_position_embeddings": 128,
}
NEMOTRON_OMNI = {
    "vision_config": RADIO,
    "vision_hidden_size": 16,
    "projector_hidden_size": 24,
    "image_token_id": IMAGE_TOKEN,
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 32,
    "patch_size": 4,
}
# queries grow at positions 8, 16, 24, ... of the test's 40
MINISTRAL3 = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 70.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.3,
    }
}
GEMMA4 = {
    **TEXT,
    "head_dim": 8,  # scores have no scale of their own: wide heads would make rounding errors grow
    "global_head_dim": 12,
    "pad_token_id": 8,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000.0,
        },
    },
}
GEMMA4_UNIFIED = {key: value for key, value in GEMMA4.items() if "per_layer" not in key}
GEMMA4_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 150,
}
GEMMA4_AUDIO = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [8, 4],
    "output_proj_dims": 24,
}
GEMMA4_MEDIA = {
    "image": padded_patches,
    "video": video_of_patches,
    "types_as": "mm_token_type_ids",
}
GEMMA4_TOKENS = {**TOKENS, "audio_token_id": 97}
CLIP = {**SIGLIP, "model_type": "clip_vision_model", "num_hidden_layers": 3, "projection_dim": 16}
LLAMA = {**TEXT, "model_type": "llama", "head_dim": 8}
LIST = {"for_transformers": lambda media: {name: value[None] for name, value in media.items()}}

MORE = (
    VisionRow(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {**TEXT, **INTERLEAVED, "head_dim": 8},
            "vision_config": QWEN3_TOWER,
            **TOKENS,
        },
        image=patches,
        video=video_by_frames,
        mrope={"merge": 2, "split_frames": True},
        **MROPE_TYPES,
        layouts=("tp2", "sp2", "pp2", "cp2", "dp2"),
        four=("tp2cp2",),
    ),
    VisionRow(
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                **INTERLEAVED,
                "head_dim": 8,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 20,
            },
            "vision_config": QWEN3_TOWER,
            **TOKENS,
        },
        image=patches,
        video=video_by_frames,
        mrope={"merge": 2, "split_frames": True},
        **MROPE_TYPES,
        layouts=("tp2", "pp2", "ep2"),
    ),
    VisionRow(
        "qwen3_5_vl",
        "Qwen3_5ForConditionalGeneration",
        {
            "text_config": {**TEXT, **DELTA_NETS, "full_attention_interval": 2},
            "vision_config": PLAIN_QWEN3_TOWER,
            **TOKENS,
        },
        image=patches,
        video=video_by_frames,
        mrope={"merge": 2, "split_frames": True},
        **MROPE_TYPES,
        layouts=("sp2", *ALL[2:]),
        four=("tp2pp2",),
    ),
    VisionRow(
        "qwen3_5_vl_tied",
        "Qwen3_5ForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                **DELTA_NETS,
                "layer_types": [
                    "full_attention",
                    "linear_attention",
                    "linear_attention",
                    "full_attention",
                ],
                "linear_num_key_heads": 4,
                "num_key_value_heads": 1,
            },
            "vision_config": PLAIN_QWEN3_TOWER,
            "tie_word_embeddings": True,
            **TOKENS,
        },
        image=patches,
        video=video_by_frames,
        mrope={"merge": 2, "split_frames": True},
        **MROPE_TYPES,
        layouts=("tp2", "pp2"),
        four=("tp2cp2",),
    ),
    VisionRow(
        "qwen3_5_moe_vl",
        "Qwen3_5MoeForConditionalGeneration",
        {
            "text_config": {
                **{key: value for key, value in TEXT.items() if key != "intermediate_size"},
                **DELTA_NETS,
                "full_attention_interval": 4,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 20,
                "shared_expert_intermediate_size": 28,
            },
            "vision_config": PLAIN_QWEN3_TOWER,
            **TOKENS,
        },
        image=patches,
        video=video_by_frames,
        mrope={"merge": 2, "split_frames": True},
        **MROPE_TYPES,
        layouts=("ep2", "tp2", "pp2", "vp2", "cp2", "etp2"),
        four=("tp2pp2ep2",),
    ),
    VisionRow(
        "glm4v",
        "Glm4vForConditionalGeneration",
        {"text_config": {**TEXT, **GLM_ROPE}, "vision_config": GLM_TOWER, **TOKENS},
        image=patches,
        video=video_as_images,
        mixes=False,
        mrope={"merge": 2, "split_frames": True},
        **MROPE_TYPES,
        layouts=("tp2", "pp2", "cp2"),
    ),
    VisionRow(
        "glm46v",
        "Glm46VForConditionalGeneration",
        {
            "text_config": {**TEXT, **GLM_ROPE, "model_type": "glm4v_text"},
            "vision_config": {**GLM_TOWER, "model_type": "glm4v_vision"},
            **TOKENS,
        },
        image=patches,
        video=video_as_images,
        mixes=False,
        mrope={"merge": 2, "split_frames": True},
        **MROPE_TYPES,
        layouts=("tp2", "sp2", "pp2", "vp2", "cp2", "dp2"),
    ),
    VisionRow(
        "glm4v_moe",
        "Glm4vMoeForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                **GLM_ROPE,
                "head_dim": 8,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 20,
                "first_k_dense_replace": 1,
                "n_group": 1,
                "topk_group": 1,
            },
            "vision_config": GLM_TOWER,
            **TOKENS,
        },
        image=patches,
        video=video_as_images,
        mixes=False,
        mrope={"merge": 2, "split_frames": True},
        **MROPE_TYPES,
        layouts=("tp2", "pp2", "ep2"),
    ),
    VisionRow(
        "llava",
        "LlavaForConditionalGeneration",
        {"text_config": LLAMA, "vision_config": CLIP, "image_token_index": IMAGE_TOKEN},
        image=whole_images(16),
        layouts=("tp2", "pp2"),
    ),
    VisionRow(
        "llama4_vl",
        "Llama4ForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                "model_type": "llama4_text",
                "head_dim": 16,
                "intermediate_size": 20,
                "intermediate_size_mlp": 48,
                "num_local_experts": 3,
                "interleave_moe_layer_step": 2,
                "attention_chunk_size": 9,
                "floor_scale": 6,
                "router_aux_loss_coef": 0.0,
            },
            "vision_config": {
                "model_type": "llama4_vision_model",
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "image_size": 16,
                "patch_size": 4,
                "projector_input_dim": 24,
                "projector_output_dim": 24,
                "vision_output_dim": 24,
                "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
            },
            "image_token_index": IMAGE_TOKEN,
        },
        image=whole_images(4),
        layouts=("tp2", "pp2", "cp2"),
    ),
    VisionRow(
        "llava_siglip",
        "LlavaForConditionalGeneration",
        {
            "text_config": {**LLAMA, "model_type": "qwen2"},
            "vision_config": SIGLIP,
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1,
            "image_token_index": IMAGE_TOKEN,
        },
        image=whole_images(16),
        layouts=("cp2",),
    ),
    VisionRow(
        "llava_next",
        "LlavaNextForConditionalGeneration",
        {
            "text_config": {**LLAMA, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**CLIP, "image_size": 8},
            "image_grid_pinpoints": [[8, 16], [16, 8]],
            "image_token_index": IMAGE_TOKEN,
        },
        image=tiles,
        layouts=("tp2",),
    ),
    VisionRow(
        "llava_onevision",
        "LlavaOnevisionForConditionalGeneration",
        {
            "text_config": {**LLAMA, "model_type": "qwen2"},
            "vision_config": {**SIGLIP, "image_size": 8},
            "image_grid_pinpoints": [[8, 16], [16, 8]],
            "image_token_index": IMAGE_TOKEN,
            "video_token_index": VIDEO_TOKEN,
        },
        image=tiles,
        layouts=("tp2",),
    ),
    VisionRow(
        "internvl",
        "InternVLForConditionalGeneration",
        {
            "text_config": {**LLAMA, "model_type": "qwen3"},
            "vision_config": {
                **{
                    key: SIGLIP[key]
                    for key in ("hidden_size", "intermediate_size", "num_hidden_layers")
                },
                "num_attention_heads": 2,
                "image_size": [16, 16],
                "patch_size": [4, 4],
            },
            "image_token_id": IMAGE_TOKEN,
        },
        image=whole_images(4),
        layouts=("tp2", "pp2"),
    ),
    VisionRow(
        "internvl_experts",
        "InternVLForConditionalGeneration",
        {
            "text_config": {
                **{key: value for key, value in LLAMA.items() if key != "intermediate_size"},
                "model_type": "qwen3_moe",
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 20,
            },
            "vision_config": {
                **{
                    key: SIGLIP[key]
                    for key in ("hidden_size", "intermediate_size", "num_hidden_layers")
                },
                "num_attention_heads": 2,
                "image_size": [16, 16],
                "patch_size": [4, 4],
            },
            "image_token_id": IMAGE_TOKEN,
        },
        image=whole_images(4),
        layouts=("ep2", "pp2", "cp2"),
    ),
    VisionRow(
        "mistral3",
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {**LLAMA, "model_type": "mistral", "sliding_window": 7},
            "vision_config": PIXTRAL,
            "image_token_index": IMAGE_TOKEN,
        },
        image=pixtral,
        layouts=("tp2", "pp2", "cp2"),
    ),
    VisionRow(
        "ministral3_vl",
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {**LLAMA, "model_type": "ministral3", **MINISTRAL3},
            "vision_config": PIXTRAL,
            "image_token_index": IMAGE_TOKEN,
            "tie_word_embeddings": False,
        },
        image=pixtral,
        layouts=("tp2", "pp2", "cp2"),
    ),
    VisionRow(
        "ministral3_vl_tied",
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {**LLAMA, "model_type": "ministral3", **MINISTRAL3},
            "vision_config": PIXTRAL,
            "image_token_index": IMAGE_TOKEN,
            "tie_word_embeddings": True,
        },
        image=pixtral,
        layouts=("pp2",),
    ),
    VisionRow(
        "smolvlm",
        "SmolVLMForConditionalGeneration",
        {
            "text_config": LLAMA,
            "vision_config": {**SIGLIP, "model_type": "smolvlm_vision"},
            "scale_factor": 2,
            "image_token_id": IMAGE_TOKEN,
        },
        image=whole_images(4),
        **LIST,
        layouts=("tp2", "pp2"),
    ),
    VisionRow(
        "idefics3",
        "Idefics3ForConditionalGeneration",
        {
            "text_config": LLAMA,
            "vision_config": {**SIGLIP, "model_type": "idefics3_vision"},
            "scale_factor": 2,
            "image_token_id": IMAGE_TOKEN,
        },
        image=whole_images(4),
        **LIST,
        layouts=("tp2",),
    ),
    VisionRow(
        "gemma3_vl",
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**TEXT, "num_hidden_layers": 6, "head_dim": 8, "sliding_window": 8},
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE_TOKEN,
        },
        image=whole_images(4),
        types_as="token_type_ids",
        layouts=("tp2", "sp2", "pp2", "cp2"),
    ),
    VisionRow(
        "gemma4_vl",
        "Gemma4ForConditionalGeneration",
        {
            "text_config": {
                **GEMMA4,
                "use_bidirectional_attention": "vision",
                "attention_k_eq_v": True,
                "num_key_value_heads": 4,
                "num_global_key_value_heads": 2,
                "final_logit_softcapping": 1.5,
            },
            "vision_config": {**GEMMA4_TOWER, "standardize": True},
            "audio_config": None,
            **GEMMA4_TOKENS,
        },
        **GEMMA4_MEDIA,
        looks_ahead=True,
        layouts=ALL,
        four=("tp2cp2", "tp2pp2", "tp4"),
    ),
    VisionRow(
        "gemma4_vl_small",
        "Gemma4ForConditionalGeneration",
        {
            "text_config": {
                **GEMMA4,
                "num_hidden_layers": 6,
                "layer_types": ["sliding_attention", "full_attention"] * 3,
                "hidden_size_per_layer_input": 10,
                "vocab_size_per_layer_input": 101,
                "num_kv_shared_layers": 2,
                "use_double_wide_mlp": True,
            },
            "vision_config": {**GEMMA4_TOWER, "use_clipped_linears": True},
            "audio_config": GEMMA4_AUDIO,
            **GEMMA4_TOKENS,
        },
        carried=("model.audio_tower.", "model.embed_audio."),
        **GEMMA4_MEDIA,
        layouts=("tp2", "sp2", "cp2", "dp2"),
    ),
    VisionRow(
        "gemma4_vl_experts",
        "Gemma4ForConditionalGeneration",
        {
            "text_config": {
                **GEMMA4,
                "use_bidirectional_attention": "vision",
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
                "enable_moe_block": True,
                "num_experts": 6,
                "top_k_experts": 3,
                "moe_intermediate_size": 20,
                "tie_word_embeddings": False,
            },
            "vision_config": {**GEMMA4_TOWER, "pooling_kernel_size": 3, "num_key_value_heads": 2},
            "audio_config": None,
            "tie_word_embeddings": False,
            **GEMMA4_TOKENS,
        },
        **GEMMA4_MEDIA,
        looks_ahead=True,
        layouts=("ep2", "pp2", "vp2", "cp2"),
    ),
    VisionRow(
        "gemma4_unified",
        "Gemma4UnifiedForConditionalGeneration",
        {
            "text_config": {
                **GEMMA4_UNIFIED,
                "use_bidirectional_attention": "vision",
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
            },
            "vision_config": {
                "patch_size": 4,
                "pooling_kernel_size": 3,
                "mm_embed_dim": 24,
                "mm_posemb_size": 75,
                "output_proj_dims": 24,
            },
            "audio_config": {"audio_embed_dim": 10},
            **GEMMA4_TOKENS,
        },
        carried=("model.embed_audio.",),
        **GEMMA4_MEDIA,
        looks_ahead=True,
        layouts=("tp2", "sp2", "pp2", "vp2", "cp2", "dp2"),
        provider={"make_query_groups_divisible_by": 1},
    ),
    VisionRow(
        "nemotron_h_omni",
        "NemotronH_Omni_Reasoning_V3",
        {"text_config": NEMOTRON_H, **NEMOTRON_OMNI},
        image=packed_patches,
        video=frames,
        encoded=encoded_video,
        mixes=False,
        layouts=("tp2", "sp2", "pp2", "cp2"),
    ),
    VisionRow(
        "nemotron_h_omni_experts",
        "NemotronH_Omni_Reasoning_V3",
        {
            "text_config": {
                **{key: value for key, value in NEMOTRON_H.items() if key != "intermediate_size"},
                "layers_block_type": ["mamba", "moe", "attention", "moe"],
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 20,
                "moe_shared_expert_intermediate_size": 28,
                "n_group": 1,
                "topk_group": 1,
            },
            "audio_config": {
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 24,
                "num_mel_bins": 16,
                "subsampling_conv_channels": 8,
                "projection_hidden_size": 24,
                "projection_bias": False,
            },
            "audio_token_id": 97,
            **NEMOTRON_OMNI,
        },
        carried=("sound_encoder.", "sound_projection."),
        image=packed_patches,
        video=frames,
        encoded=encoded_video,
        mixes=False,
        layouts=("tp2", "ep2"),
    ),
    VisionRow(
        "nemotron_nano_vl",
        "NemotronH_Nano_VL_V2",
        {
            "text_config": NEMOTRON_H,
            **NEMOTRON_OMNI,
            "vision_config": {
                key: value for key, value in RADIO.items() if key != "video_temporal_patch_size"
            },
            "force_image_size": 16,
            "ps_version": "v2",
        },
        carried=("vision_model.radio_model.input_conditioner.",),
        image=some_tiles,
        layouts=("tp2", "sp2", "unshared", "pp2", "cp2", "dp2"),
    ),
    VisionRow(
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                "model_type": "gemma",
                "head_dim": 16,
                "num_key_value_heads": 1,
            },
            "vision_config": {**SIGLIP, "vision_use_head": False},
            "projection_dim": 32,
            "image_token_index": IMAGE_TOKEN,
        },
        image=whole_images(16),
        types_as="token_type_ids",
        prompt=37,
        layouts=("tp2", "pp2", "cp2"),
    ),
    VisionRow(
        "paligemma2",
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                "model_type": "gemma2",
                "head_dim": 12,
                "query_pre_attn_scalar": 20,
                "sliding_window": 25,
                "attn_logit_softcapping": 5.0,
                "final_logit_softcapping": 7.0,
            },
            "vision_config": {**SIGLIP, "image_size": 12, "vision_use_head": False},
            "projection_dim": 32,
            "image_token_index": IMAGE_TOKEN,
        },
        image=whole_images(9),
        types_as="token_type_ids",
        prompt=23,
        layouts=("tp2", "sp2", "pp2", "cp2"),
    ),
)

AUDIO = (
    VisionRow(
        "qwen2_audio",
        "Qwen2AudioForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "audio_config": {
                "num_mel_bins": 8,
                "d_model": 16,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 24,
                "max_source_positions": 16,
            },
            "audio_token_index": AUDIO_TOKEN,
        },
        image=recording,
        layouts=ALL,
        four=("tp2cp2",),
    ),
    VisionRow(
        "voxtral",
        "VoxtralForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "llama", "head_dim": 12},
            "audio_config": {
                "num_mel_bins": 8,
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "max_source_positions": 16,
            },
            "audio_token_id": AUDIO_TOKEN,
        },
        image=stretches,
        layouts=ALL,
    ),
)

ROWS = {row.name: row for row in (*FIRST, *MORE, *AUDIO)}
