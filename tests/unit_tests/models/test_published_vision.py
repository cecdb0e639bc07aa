# SPDX-License-Identifier: Apache-2.0
"""The sizes of published vision-language models: their configs are read, plans close, and counts add up."""

from pathlib import Path

import pytest

from megatron.bridge import AutoBridge
from tests import families

FILES = {
    path.stem: path
    for path in sorted((Path(families.__path__[0]) / "published_vision").glob("*.json"))
}
# trainable parameters, as the files on the hub add up
COUNTS = {
    "Qwen--Qwen2-VL-2B-Instruct": 2_208_985_600,
    "Qwen--Qwen2-VL-7B-Instruct": 8_291_375_616,
    "Qwen--Qwen2-VL-72B-Instruct": 73_405_560_320,
    "Qwen--Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen--Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen--Qwen2.5-VL-72B-Instruct": 73_410_777_344,
    "Qwen--Qwen3-VL-8B-Instruct": 8_767_123_696,
    "Qwen--Qwen3-VL-30B-A3B-Instruct": 31_070_754_032,
    "google--paligemma-3b-pt-224": 2_923_466_480,
    "google--paligemma2-3b-pt-224": 3_032_242_416,
    "google--gemma-3-4b-it": 4_300_079_472,
    "google--gemma-3-12b-it": 12_187_325_040,
    "google--gemma-3-27b-it": 27_432_406_640,
    "google--gemma-4-26B-A4B": 25_805_933_872,
    "google--gemma-4-31B-it": 31_273_086_512,
    "Qwen--Qwen3.5-27B": 27_356_728_560,
    "Qwen--Qwen3.5-35B-A3B": 35_107_181_936,
    "mistralai--Mistral-Small-3.1-24B-Instruct-2503": 24_011_361_280,
    "llava-hf--llava-1.5-7b-hf": 7_063_427_072,
    "llava-hf--llava-v1.6-mistral-7b-hf": 7_566_747_648,
    "OpenGVLab--InternVL3-8B-hf": 7_944_373_760,
    "zai-org--GLM-4.1V-9B-Thinking": 10_292_777_472,
    "meta-llama--Llama-4-Scout-17B-16E": 108_641_793_536,
    "meta-llama--Llama-4-Maverick-17B-128E": 401_583_781_376,
    "HuggingFaceTB--SmolVLM2-256M-Video-Instruct": 256_484_928,
}


LIMITS_AND_SCALES = (
    *(".input_min", ".input_max", ".output_min", ".output_max"),
    *(".std_bias", ".std_scale"),
)
"""Buffers of Gemma 4's tower that checkpoints have."""


@pytest.mark.sampled
@pytest.mark.parametrize("name", FILES)
def test_a_published_size(tmp_path, name):
    (tmp_path / "config.json").write_bytes(FILES[name].read_bytes())
    bridge = AutoBridge.from_hf_pretrained(tmp_path)
    provider = bridge.to_megatron_provider(load_weights=False)
    model = provider.meta_model()
    plan = AutoBridge.from_hf_config(bridge.hf_config).plan(model)
    buffers = [
        name
        for name in model[0].state_dict(keep_vars=True)
        if name.endswith((".expert_bias", ".layer_scale", *LIMITS_AND_SCALES))
    ]
    assert len(plan.tasks) == len(list(model[0].parameters())) + len(buffers)
    if name in COUNTS:
        assert sum(parameter.numel() for parameter in model[0].parameters()) == COUNTS[name]
    changed = bridge._bridge.changed_config(provider, bridge.hf_config.to_dict())
    assert changed in (
        {},
        {"tie_word_embeddings": False},
    )  # transformers guesses where a config does not say
