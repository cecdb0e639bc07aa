# SPDX-License-Identifier: Apache-2.0
"""Nemotron Nano VL v2: configs as they are released, what is refused, and tiles."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.bridge import AutoBridge
from megatron.bridge.models.hf_pretrained.remote_configs import NanoVLConfig
from megatron.bridge.models.vision.tower import dummy_media, encode
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.utils.errors import UserError
from tests.families.nano_vl import shuffled
from tests.families.own_models import model_class
from tests.families.vision import harness
from tests.unit_tests.models.test_vision_model import omni_config, provider_of, read_weights, run

NAME = "nemotron_nano_vl"
# as many tokens of its own as the row's tower has: two for the teachers, one more
ARGS = {
    "cls_token_per_teacher": True,
    "cpe_max_size": 32,
    "register_multiple": 3,
    "teachers": [{"name": "clip"}, {"name": "dino"}, {"name": "clip", "use_summary": False}],
}
DERIVED = ("num_cls_tokens", "num_registers", "max_img_size")


def released(config):
    """With the names of keys, and some of the keys, that remote code has."""
    names = {
        "image_token_id": "img_context_token_id",
        "text_config": "llm_config",
        "vision_hidden_size": "vit_hidden_size",
    }
    config |= {new: config.pop(old) for old, new in names.items()}
    config |= {
        "img_context_token": "<image>",
        "img_start_token": "<img>",
        "template": "nemotron",
        "auto_map": {},
    }
    config |= {
        "norm_mean": [0.5] * 3,
        "norm_std": [0.5] * 3,
        "use_thumbnail": True,
        "patch_size": 4,
    }
    del config["llm_config"]["time_step_limit"]  # transformers writes infinity in a way of its own
    del config["video_temporal_patch_size"]
    kept = {key: value for key, value in config["vision_config"].items() if key not in DERIVED}
    config["vision_config"] = {
        **kept,
        "args": ARGS,
        "adaptor_names": None,
        "vitdet_window_size": None,
    }


def test_a_released_config(vision_case, tmp_path):
    case = vision_case(NAME)
    bridge = omni_config(case, tmp_path, released)
    _, provider = provider_of(case)
    again = bridge.to_megatron_provider(load_weights=False)
    assert again.layer_kinds == provider.layer_kinds
    assert again.vision["vision_config"].items() >= provider.vision["vision_config"].items()
    save_file(read_weights(case.checkpoint), tmp_path / "model.safetensors", {"format": "pt"})
    bridge = AutoBridge.from_hf_pretrained(tmp_path)
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    assert (run(case, model) - case.logits[:1]).abs().max() / case.logits.std() < 1e-4
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    source, written = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path, tmp_path / "out")
    )
    assert source == written


@pytest.mark.parametrize(
    ("args", "sizes"),
    [
        (
            {
                "register_multiple": 8,
                "cls_token_per_teacher": True,
                "teachers": [{"name": str(i)} for i in range(4)],
            },
            (4, 4),
        ),
        ({"register_multiple": 16}, (1, 15)),
        (
            {
                "register_multiple": 4,
                "cls_token_per_teacher": True,
                "teachers": [{"name": str(i)} for i in range(4)],
            },
            (4, 4),
        ),
        ({}, (3, 7)),
    ],
)
def test_tokens_of_the_tower(args, sizes):
    """A whole multiple of registers where the tokens are a multiple already, as the remote code has it."""
    vision = NanoVLConfig(vision_config={"args": args}).vision_config
    assert (vision.num_cls_tokens, vision.num_registers) == sizes
    assert (vision.hidden_size, vision.num_hidden_layers, vision.video_temporal_patch_size) == (
        1280,
        32,
        None,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda config: config.pop("ps_version"),
            "ps_version='v1', which transposes tiles, is not supported: v2 is",
        ),
        (lambda config: config.update(ps_version="v1"), "ps_version='v1'"),
        (lambda config: config.update(tiles=3), "key tiles=3 is not known"),
        (
            lambda config: config["vision_config"].update(windows=3),
            "vision_config: key windows=3 is not known",
        ),
        (
            lambda config: config["vision_config"].update(adaptor_names=["clip"]),
            "adaptor_names=.* is not supported",
        ),
        (
            lambda config: config.update(
                vision_config={"args": {"model": "vit_large_patch16_224"}}
            ),
            "vision_config.args.model='vit_large_patch16_224' is not supported: vit_huge_patch16_224 is",
        ),
        # Nemotron Omni under its older name
        (
            lambda config: config["vision_config"].update(video_temporal_patch_size=2),
            "video_temporal_patch_size.*equal",
        ),
    ],
)
def test_what_is_refused(vision_case, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        omni_config(vision_case(NAME), tmp_path, change).to_megatron_provider(load_weights=False)


def test_videos_are_frames(vision_case):
    _, provider = provider_of(vision_case(NAME), perform_initialization=True)
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False)
    assert dummy_media(model.vision)["pixel_values"].shape == (1, 3, 16, 16)
    with pytest.raises(UserError, match="its videos are frames: give each as an image"):
        encode(model.vision, {"pixel_values_videos": torch.zeros(2, 3, 16, 16)})


def test_a_video_pruning_rate_is_of_videos(vision_case, tmp_path):
    bridge = omni_config(
        vision_case(NAME), tmp_path, lambda config: config.update(video_pruning_rate=0.7)
    )
    assert bridge.to_megatron_provider(load_weights=False).meta_model()[0].vision is not None


def test_tiles_that_are_not_square(vision_case):
    """Positions are cut: the published tiles are square, and the tower takes others."""
    case = vision_case(NAME)
    _, provider = provider_of(case)
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False)
    reference = (
        model_class(case.row.model).from_pretrained(case.checkpoint, dtype=torch.float32).eval()
    )
    pixels = torch.randn(2, 3, 16, 24)
    with torch.no_grad():
        expected = reference.mlp1(shuffled(reference.vision_model["radio_model"](pixels))).flatten(
            0, 1
        )
        found = encode(model.vision, {"pixel_values": pixels})
    assert found.counts == [6, 6]
    assert harness.harness.distance(expected, found.rows, expected.std()) < 1e-5


def test_adapters_have_the_names_of_the_remote_modules(vision_case, tmp_path):
    case = vision_case(NAME)
    bridge, provider = provider_of(case)
    targets = [
        "linear_fc2",
        "vision.vision_model.encoder.layer.*.qkv",
        "vision.multi_modal_projector.linear_1",
    ]
    provider.register_pre_wrap_hook(LoRA(target_modules=targets, dim=4, alpha=8))
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    bridge.save_hf_adapter(model, tmp_path, show_progress=False)
    names = {
        name.removeprefix("base_model.model.")
        for name in load_file(tmp_path / "adapter_model.safetensors")
    }
    modules = {name.rpartition(".lora_")[0] for name in names}
    decoder = {f"language_model.backbone.layers.{layer}.mixer.down_proj" for layer in (1, 3)}
    assert modules == decoder | {
        "mlp1.1",
        *(f"vision_model.radio_model.model.blocks.{n}.attn.qkv" for n in (0, 1)),
    }
