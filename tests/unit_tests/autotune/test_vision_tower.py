# SPDX-License-Identifier: Apache-2.0
"""Counted memory of vision towers, against the live storages of towers and of whole steps on the CPU."""

import math

import pytest
import torch
from megatron.core import tensor_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron.bridge import AutoBridge
from megatron.bridge.autotune import activations, meta_model
from megatron.bridge.autotune.memory import memory_per_rank
from megatron.bridge.autotune.search.price import Pricer
from megatron.bridge.autotune.search.search import candidate_of
from megatron.bridge.autotune.vision_tower import (
    LiveBytes,
    _dropped_gradients,
    _make_image,
    tower_counts,
    tower_flops,
)
from megatron.bridge.backends.kernels import eager
from megatron.bridge.models.vision.merge import media_rows
from megatron.bridge.models.vision.tower import build_tower, encode
from tests.families import harness
from tests.families.own_models import model_class
from tests.families.vision.rows import ROWS
from tests.one_stage import run_stage
from tests.unit_tests.autotune.search.test_price import tensors
from tests.unit_tests.autotune.test_memory import configured

TOKENS = 1024
NAMES = [
    "qwen2_5_vl",
    "qwen3_vl",
    "glm4v",
    "gemma3_vl",
    "gemma4_vl",
    "gemma4_unified",
    "llava",
    "internvl",
    "mistral3",
    "paligemma",
    "nemotron_nano_vl",
    "smolvlm",
    "idefics3",
    "nemotron_h_omni",
    "qwen2_audio",
    "voxtral",
]


def hf_config(name, depth=None):
    kind = model_class(ROWS[name].model)
    config = kind.config_class(**ROWS[name].config)
    if depth:
        config.vision_config.depth = config.text_config.num_hidden_layers = depth
        config.text_config.layer_types = config.text_config.layer_types[:1] * depth
    config.architectures = [kind.__name__]
    return config


def towers(name):
    """The tower of a row on the meta device and on the CPU."""
    vision = hf_config(name).to_dict()
    with torch.device("meta"):
        meta = build_tower(vision, torch.float32, initialize=False)
    return meta, build_tower(vision, torch.float32)


def real(media):
    return {
        name: torch.ones(value.shape) if value.is_meta else value for name, value in media.items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_counts_are_those_of_a_real_tower(name):
    meta, tower = towers(name)
    counts = tower_counts(meta, TOKENS)
    media = real(_make_image(meta, TOKENS))
    with LiveBytes() as live, _dropped_gradients(tower):
        found = encode(tower, media)
        kept = live.now
        found.rows.backward(torch.ones_like(found.rows))
    scale = TOKENS / sum(found.counts)
    assert counts.kept == pytest.approx(kept * scale, rel=0.01)
    assert counts.kept + counts.working == pytest.approx(live.peak * scale, rel=0.01)


@pytest.mark.sampled
@pytest.mark.parametrize("name", NAMES)
def test_operations_are_those_of_a_real_tower(name):
    meta, tower = towers(name)
    media = real(_make_image(meta, TOKENS))
    # fused kernels of a CPU are not counted
    with (
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
        _dropped_gradients(tower),
    ):
        found = encode(tower, media)
        found.rows.backward(torch.ones_like(found.rows))
    expected = counter.get_total_flops() * TOKENS / sum(found.counts)
    assert tower_flops(meta, TOKENS) == pytest.approx(expected, rel=0.01)


def test_attention_of_the_tower_is_as_before():
    meta, _ = towers("qwen2_5_vl")
    name = meta.visual.config._attn_implementation
    tower_counts(meta, 4)
    assert meta.visual.config._attn_implementation == name


def run_config(**values):
    """A run whose samples may be images from the first to the last token."""
    bridge = AutoBridge.from_hf_config(hf_config("qwen2_5_vl", depth=6))
    provider = bridge.to_megatron_provider(load_weights=False)
    for key, value in {
        **harness.settings(provider, {}, {}),
        "bf16": True,
        "seq_length": 1024,
        **values,
    }.items():
        setattr(provider, key, value)
    provider.params_dtype = torch.bfloat16
    config = configured(provider)
    config.train.global_batch_size = 4
    ranks = [values.get(f"{kind}_model_parallel_size", 1) for kind in ("tensor", "pipeline")]
    return config.resolve(math.prod(ranks)).config


def peak(config, stage):
    """Bytes that a step with samples of nothing but images holds at most, weights and gradients left out."""
    model, length = config.model, config.dataset.seq_length
    with meta_model.as_stage(model, stage):
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        (chunk,) = model.resolved().build_chunks()
        for parameter in chunk.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        tokens = torch.full((1, length), model.image_token_id)
        labels = torch.zeros_like(tokens)
        given = {
            "position_ids": torch.arange(length).expand(3, 1, -1),
            "attention_mask": None,
            "labels": labels,
        }
        given["media_rows"] = media_rows(tokens, model.image_token_id, None)
        given["media"] = real(_make_image(chunk.vision, length))

        def step(_, chunk):
            output = chunk(input_ids=tokens, **given)
            return output, lambda losses: (losses.float().mean(), {})

        with LiveBytes() as live:
            run_stage(
                step, [chunk], chunk.config, model.pipeline_model_parallel_size, stage, 4, length
            )
    return live.peak


@pytest.mark.parametrize(
    "values", [{}, {"recompute_vision_model": True}, {"pipeline_model_parallel_size": 2}]
)
def test_peak_is_that_of_a_real_step(monkeypatch, values):
    monkeypatch.setattr(eager, "CHUNK", 1 << 13)  # a block of logits would be all logits of a toy
    config = run_config(**values)
    chunks = meta_model.stage_chunks(config.model)[0]
    estimate = activations.activation_bytes(
        config, chunks, 0, config.model.pipeline_model_parallel_size
    )
    assert estimate == pytest.approx(peak(config, 0), rel=0.05)


def images_of(config):
    return activations.sizes_of(config).image_tokens


def test_images_are_shared_and_limited():
    two = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    assert images_of(run_config()) == 256
    assert images_of(run_config(**two)) == 128
    large = run_config(**two)
    tower = large.model.vision["vision_config"]
    large.dataset.max_pixels = 200 * (tower["patch_size"] * tower["spatial_merge_size"]) ** 2
    assert images_of(large) == 200, "one rank encodes the whole of an image"
    large.model.vision = large.model.vision | {"model_type": "glm4v"}
    assert images_of(large) == 128, "GLM's limit is that of two frames, so an image has 100 tokens"
    assert images_of(run_config(**two, share_images=False)) == 256
    config = run_config()
    config.dataset.max_image_tokens = 100
    assert images_of(config) == 100


def test_the_tuner_prices_the_tower():
    config = run_config(pipeline_model_parallel_size=2)
    exact = [rank.total for rank in memory_per_rank(config, 2)]
    assert tensors(Pricer(config, 2, "H100 80GB"), candidate_of(config)) == pytest.approx(
        exact, rel=0.02
    )
