# SPDX-License-Identifier: Apache-2.0
"""A decoder with a vision tower: freezing, precision, other names of tensors, wrong input, text alone."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.bridge import AutoBridge
from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.models.vision.media import share_out
from megatron.bridge.models.vision.merge import look_ahead, media_rows, prompt_look_ahead
from megatron.bridge.utils.errors import UserError
from tests.families.harness import read_weights
from tests.families.own_models import model_class
from tests.families.vision import harness
from tests.families.vision.samples import IMAGE_TOKEN, VIDEO_TOKEN

TOWER, PROJECTOR = "visual.blocks.0.attn.qkv.weight", "visual.merger.mlp.0.weight"
DECODER = "model.layers.0.mlp.down_proj.weight"
PARTS = {
    "freeze_language_model": DECODER,
    "freeze_vision_model": TOWER,
    "freeze_vision_projection": PROJECTOR,
}


def provider_of(case, **changes):
    bridge = AutoBridge.from_hf_pretrained(case.checkpoint)
    provider = bridge.to_megatron_provider()
    for name, value in changes.items():
        setattr(provider, name, value)
    return bridge, provider


def run(case, model, index=0, **changes):
    """Logits of one sample."""
    sample = case.samples(AutoBridge.from_hf_pretrained(case.checkpoint).hf_config)[index]
    batch, media = harness.this_rank(sample, case.row)
    given = {
        "input_ids": batch["ids"],
        "position_ids": batch["positions"],
        "attention_mask": case.row.sight(sample) if case.row.prompt else None,
        "media": media,
        **changes,
    }
    return model[0](**given)


# ---- freezing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", PARTS)
def test_what_is_frozen_gets_no_gradient(vision_case, flag):
    case = vision_case("qwen2_5_vl")
    bridge, provider = provider_of(case, **{flag: True})
    model = provider.provide_distributed_model()
    samples = case.samples(bridge.hf_config)
    harness.forward_backward(model, samples, case.row)
    trained = {task.mapping.hf_names[0]: task.param_weight for task in bridge.plan(model).tasks}
    for part, name in PARTS.items():
        assert trained[name].requires_grad == (part != flag)
        if part != flag:
            expected = case.gradients[name]
            assert (
                trained[name].main_grad - expected
            ).abs().max() <= 1e-3 * expected.square().mean().sqrt()


def test_a_frozen_tower_keeps_no_activations(vision_case):
    case = vision_case("qwen2_5_vl")
    _, provider = provider_of(case, freeze_vision_model=True, freeze_vision_projection=True)
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    ran = []
    model[0].vision.visual.register_forward_hook(
        lambda _m, _i, out: ran.append(out.pooler_output.requires_grad)
    )
    run(case, model)
    run(case, model, index=2)  # no image: nothing runs
    assert ran == [False]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", ["qwen2_5_vl", "qwen3_vl", "gemma3_vl", "mistral3", "nemotron_h_omni"]
)
def test_recomputed_layers_give_the_same_gradients(vision_case, name):
    def gradients(recompute):
        bridge, provider = provider_of(vision_case(name), recompute_vision_model=recompute)
        model = provider.provide_distributed_model()
        layers = [
            part for part in model[0].modules() if getattr(part, "gradient_checkpointing", False)
        ]
        harness.forward_backward(
            model, vision_case(name).samples(bridge.hf_config), vision_case(name).row
        )
        return len(layers), {
            key: value.main_grad
            for key, value in model[0].named_parameters()
            if value.requires_grad
        }

    (none, expected), (some, found) = gradients(False), gradients(True)
    assert none == 0 < some
    assert all(value.equal(expected[key]) for key, value in found.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"freeze_language_model": True, "pipeline_model_parallel_size": 2},
            "freeze_language_model=True leaves nothing to train .* set model.pipeline_model_parallel_size=1",
        ),
        (dict.fromkeys(PARTS, True), "freeze_language_model=True leaves nothing to train, because"),
        (
            {"freeze_language_model": True, "vision": None},
            "freeze_language_model=True leaves nothing to train",
        ),
    ],
)
def test_nothing_to_train(vision_case, changes, message):
    _, provider = provider_of(vision_case("qwen2_5_vl"), **changes)
    with pytest.raises(UserError, match=message):
        provider.provide_distributed_model()


# ---- precision --------------------------------------------------------------------------------------------------


def test_frequencies_stay_exact_in_half_precision(vision_case):
    _, provider = provider_of(vision_case("qwen2_5_vl"), bf16=True)
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False)
    tower = unwrap(model).vision
    assert {buffer.dtype for buffer in tower.buffers()} == {torch.float32}
    assert {parameter.dtype for parameter in tower.parameters()} == {torch.bfloat16}


# ---- names ------------------------------------------------------------------------------------------------------

RENAMED = {
    "qwen2_5_vl": {"visual.": "model.visual.", "model.": "model.language_model."},
    "gemma3_vl": {"vision_tower.": "vision_tower.vision_model."},
    "paligemma": {"vision_tower.": "vision_tower.vision_model."},
    "llava": {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
    "llava_next": {"vision_tower.": "vision_tower.vision_model."},
    "nemotron_nano_vl": {"language_model.backbone.": "language_model.model."},
}


def rename(source, directory, prefixes):
    """The checkpoint in one file, under other names."""
    directory.mkdir()
    tensors = {}
    for name, value in read_weights(source).items():
        start = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default="")
        tensors[prefixes.get(start, "") + name[len(start) :]] = value
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())


@pytest.mark.sampled
@pytest.mark.parametrize("name", RENAMED)
def test_other_names(vision_case, tmp_path, name):
    case = vision_case(name)
    rename(case.checkpoint, tmp_path / "hf", RENAMED[name])
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    assert (run(case, model) - case.logits[:1]).abs().max() / case.logits.std() < 1e-4
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    source, written = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "out")
    )
    assert source.keys() == written.keys()
    assert all(torch.equal(value, written[key]) for key, value in source.items())


@pytest.mark.parametrize(
    "name", ["qwen3_vl_moe", "llava_next", "smolvlm", "nemotron_h_omni_experts", "nemotron_nano_vl"]
)
def test_text_alone(vision_case, tmp_path, name):
    """Without a tower the text model is the same, and an export copies the tower from its source."""
    case = vision_case(name)
    bridge, provider = provider_of(case, vision=None)
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    assert not any("vision" in name for name, _ in model[0].named_parameters())
    error = (run(case, model, index=2) - case.logits[2:3]).abs().max() / case.logits.std()
    assert error < 1e-4
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    assert harness.harness.different_files(case, tmp_path / "out") == []


@pytest.mark.parametrize("name", ["qwen3_vl", "paligemma2", "nemotron_h_omni", "nemotron_nano_vl"])
def test_a_config_is_written_without_a_source(vision_case, tmp_path, name):
    case = vision_case(name)
    bridge, provider = provider_of(case)
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    AutoBridge.from_hf_config(bridge.hf_config).save_hf_pretrained(
        model, tmp_path / "out", show_progress=False
    )
    again = AutoBridge.from_hf_pretrained(tmp_path / "out").to_megatron_provider(load_weights=False)
    assert (again.vision, again.mrope_section) == (provider.vision, provider.mrope_section)
    written = bridge._bridge.megatron_to_hf_config(provider)
    assert (
        type(bridge.hf_config)(**written).to_dict()["vision_config"]
        == bridge.hf_config.to_dict()["vision_config"]
    )


# ---- wrong input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen2_5_vl", {"media": None}, r"input_ids has 2 placeholders .* the images have 0"),
        (
            "qwen2_5_vl",
            {"input_ids": torch.zeros(1, 40, dtype=torch.long)},
            "input_ids has 0 placeholders .* the images have 2",
        ),
        (
            "qwen2_5_vl",
            {"position_ids": torch.arange(40)[None]},
            r"position_ids is \[batch, sequence\] .*mrope_positions",
        ),
        (
            "llava",
            {"media": {"pixel_values": torch.zeros(1, 3, 9, 9)}},
            r"cannot encode media with pixel_values \[1, 3, 9, 9\] .*: check the shapes",
        ),
        (
            "qwen2_5_vl",
            {"media": {"pixel_values": torch.zeros(1), "pixels": torch.zeros(1)}},
            "media has pixels, which Qwen2_5_VLModel does not take",
        ),
        ("paligemma", {"attention_mask": None}, "attention_mask is missing: .*prompt_look_ahead"),
        (
            "paligemma2",
            {"attention_mask": prompt_look_ahead(torch.ones(1, 40).cumsum(-1) - 29, [0, 40])},
            "30 tokens see each other both ways, more than the attention window of 25: .*shorter prompts",
        ),
        (
            "nemotron_h_omni",
            {"media": {"input_features": torch.zeros(1)}},
            "media has input_features: audio is not supported",
        ),
    ],
)
def test_wrong_input(vision_case, name, changes, message):
    case = vision_case(name)
    model = provider_of(case)[1].provide_distributed_model(wrap_with_ddp=False)
    with pytest.raises(UserError, match=message):
        run(case, model, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "qwen3_vl",
            {"recompute_granularity": "full", "recompute_method": "uniform"},
            "model.recompute_granularity",
        ),
        ("qwen3_vl", {"apply_rope_fusion": True}, "set model.apply_rope_fusion=False"),
        (
            "qwen3_vl",
            {"mrope_section": [3, 1, 1]},
            r"mrope_section=\[3, 1, 1\] must be three numbers that sum up to 4",
        ),
        (
            "gemma3_vl",
            {"backend": "transformer_engine"},
            "set model.backend='torch'|transformer_engine",
        ),
        (
            "paligemma",
            {"backend": "transformer_engine"},
            "set model.backend='torch'|transformer_engine",
        ),
    ],
)
def test_wrong_settings(vision_case, name, changes, message):
    _, provider = provider_of(vision_case(name), **changes)
    with pytest.raises(UserError, match=message):
        provider.provide_distributed_model(wrap_with_ddp=False)


# ---- small parts ------------------------------------------------------------------------------------------------


def test_rows_of_features():
    ids = torch.tensor(
        [[1, IMAGE_TOKEN, VIDEO_TOKEN, 2], [IMAGE_TOKEN, 3, VIDEO_TOKEN, VIDEO_TOKEN]]
    )
    assert media_rows(ids, IMAGE_TOKEN, VIDEO_TOKEN).tolist() == [[-1, 0, 2, -1], [1, -1, 3, 4]]


def test_an_image_sees_itself():
    ids = torch.tensor([[IMAGE_TOKEN, IMAGE_TOKEN, 1, IMAGE_TOKEN, IMAGE_TOKEN, IMAGE_TOKEN]])
    assert look_ahead(ids, IMAGE_TOKEN).tolist() == [[1, 0, 0, 2, 1, 0]]


def test_a_prompt_sees_itself():
    """Nothing sees ahead where nothing is trained, and a packed row has a prompt for each of its samples."""
    mask = torch.tensor([[0, 0, 1, 1, 0, 0, 1, 0, 0, 0]])
    assert prompt_look_ahead(mask, [0, 4, 8, 10]).tolist() == [[2, 1, 0, 0, 2, 1, 0, 0, 0, 0]]
    assert prompt_look_ahead(mask, [0, 10]).tolist() == [[2, 1, 0, 0, 0, 0, 0, 0, 0, 0]]


def test_images_are_shared_out_evenly():
    owners = share_out([4, 4, 2, 2, 2, 2], 2)
    assert sorted(owners) == [0, 0, 0, 1, 1, 1]
    assert share_out([], 3) == []


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", ["qwen3_vl_moe", "llava_next", "nemotron_h_omni", "nemotron_nano_vl"]
)
def test_a_megatron_checkpoint(vision_case, tmp_path, name):
    """Through a Megatron checkpoint and back: the same logits and every byte."""
    case = vision_case(name)
    AutoBridge.import_ckpt(case.checkpoint, tmp_path / "megatron", show_progress=False)
    bridge = AutoBridge.from_hf_pretrained(case.checkpoint)
    bridge.export_ckpt(tmp_path / "megatron", tmp_path / "out", show_progress=False)
    assert harness.harness.different_files(case, tmp_path / "out") == []
    model = bridge.load_megatron_model(tmp_path / "megatron", wrap_with_ddp=False)
    assert (run(case, model) - case.logits[:1]).abs().max() / case.logits.std() < 1e-4


# ---- Nemotron Omni ----------------------------------------------------------------------------------------------


def omni_config(case, folder, change):
    config = json.loads((case.checkpoint / "config.json").read_text())
    change(config)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return AutoBridge.from_hf_pretrained(folder)


def spelled_as_released(config):
    """With the names of keys, and some of the keys, that remote code has."""
    names = {
        "image_token_id": "img_context_token_id",
        "text_config": "llm_config",
        "vision_hidden_size": "vit_hidden_size",
    }
    config |= {new: config.pop(old) for old, new in names.items()}
    config |= {
        "model_type": "NemotronH_Nano_Omni_Reasoning_V3",
        "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"],
    }
    config |= {
        "ps_version": "v2",
        "img_context_token": "<image>",
        "template": "nemotron",
        "auto_map": {},
    }
    del config["llm_config"]["time_step_limit"]  # transformers writes infinity in a way of its own
    config["sound_config"] = {**config.pop("audio_config"), "model_type": "parakeet"}
    config["vision_config"] |= {
        "version": "radio_v2.5-h",
        "args": {"register_multiple": 10},
        "vitdet_window_size": None,
    }


def test_released_names_of_keys(vision_case, tmp_path):
    case = vision_case("nemotron_h_omni_experts")
    _, provider = provider_of(case)
    again = omni_config(case, tmp_path, spelled_as_released).to_megatron_provider(
        load_weights=False
    )
    assert again.layer_kinds == provider.layer_kinds
    assert again.vision["vision_config"].items() >= provider.vision["vision_config"].items()
    for key in ("image_token_id", "vision_hidden_size", "audio_config"):
        assert again.vision[key] == provider.vision[key]
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
    ("change", "message"),
    [
        (
            lambda config: config.update(video_pruning_rate=0.7),
            r"video_pruning_rate=0.7 is not supported: set it to 0",
        ),
        (
            lambda config: config["vision_config"].update(vitdet_window_size=4),
            "vitdet_window_size=4 is not supported",
        ),
        (
            lambda config: config["vision_config"].update(layerscale_value=0.5),
            r"layerscale_value=0.5 .*set it to 1.0",
        ),
        (
            lambda config: config["text_config"].update(num_nextn_predict_layers=1),
            "num_nextn_predict_layers=1",
        ),
    ],
)
def test_what_omni_refuses(vision_case, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        omni_config(vision_case("nemotron_h_omni"), tmp_path, change).to_megatron_provider(
            load_weights=False
        ).meta_model()


def test_no_layer_of_the_decoder_is_built_beside_the_tower(vision_case, monkeypatch):
    """Transformers' defaults have four, with experts as wide as the published ones."""
    from transformers.models.nemotron_h import modeling_nemotron_h

    _, provider = provider_of(vision_case("nemotron_h_omni"))
    monkeypatch.setattr(
        modeling_nemotron_h.NemotronHBlock, "__init__", lambda *_, **__: pytest.fail("a layer")
    )
    assert provider.meta_model()[0].vision is not None


def test_audio_is_not_left_out_of_an_export(vision_case, tmp_path):
    bridge, provider = provider_of(vision_case("nemotron_h_omni_experts"))
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    with pytest.raises(UserError, match=r"sound_encoder\.\*\*"):
        AutoBridge.from_hf_config(bridge.hf_config).save_hf_pretrained(
            model, tmp_path / "out", show_progress=False
        )


def test_pixels_are_cast_to_half_precision(vision_case):
    case = vision_case("nemotron_h_omni")
    _, provider = provider_of(case, bf16=True)
    logits = run(case, provider.provide_distributed_model(wrap_with_ddp=False))
    assert (logits.float() - case.logits[:1]).abs().max() / case.logits.std() < 0.2


def test_towers_without_layer_scales(vision_case, tmp_path):
    """As they are published; transformers fills in ones."""
    case, folder = vision_case("nemotron_h_omni"), tmp_path / "hf"
    omni_config(case, folder, lambda config: None)
    weights = {
        name: value
        for name, value in read_weights(case.checkpoint).items()
        if "layer_scale" not in name
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    bridge = AutoBridge.from_hf_pretrained(folder)
    provider = bridge.to_megatron_provider()
    assert not provider.radio_layer_scales
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    hf = model_class(case.row.model).from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    expected = harness.hf_logits(hf.eval(), case.samples(bridge.hf_config)[0], case.row)
    assert (run(case, model) - expected).abs().max() / expected.std() < 1e-4
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == weights.keys()
