# SPDX-License-Identifier: Apache-2.0
"""The real numbers of published models: their config.json comes back, in either spelling, and counts add up."""

import json
import math
from pathlib import Path

import pytest
import torch

from megatron.bridge import AutoBridge
from tests.families import configs, published
from tests.families.own_models import model_class
from tests.families.spelling import respelled

FILES = {path.stem: path for path in sorted(Path(published.__path__[0]).glob("*.json"))}
# trainable parameters, as the files on the hub add up
COUNTS = {
    "ai21labs--Jamba-v0.1": 51_570_323_328,
    "allenai--OLMo-2-0325-32B": 32_234_279_936,
    "allenai--OLMo-2-0425-1B": 1_484_916_736,
    "allenai--OLMo-2-1124-7B": 7_298_617_344,
    "allenai--OLMo-2-1124-13B": 13_716_198_400,
    "google--gemma-2b": 2_506_172_416,
    "google--gemma-7b": 8_537_680_896,
    "google--gemma-2-2b": 2_614_341_888,
    "google--gemma-2-9b": 9_241_705_984,
    "google--gemma-2-27b": 27_227_128_320,
    "google--gemma-3-1b-pt": 999_885_952,
    "ibm-granite--granite-3.1-2b-base": 2_533_531_648,
    "ibm-granite--granite-3.1-8b-base": 8_170_848_256,
    "zai-org--glm-4-9b-chat-hf": 9_399_951_360,
    "zai-org--GLM-4-9B-0414": 9_400_279_040,
    "zai-org--GLM-4-32B-0414": 32_566_081_536,
    "HuggingFaceTB--SmolLM3-3B": 3_075_098_624,
    "Qwen--Qwen1.5-0.5B": 463_987_712,
    "Qwen--Qwen1.5-7B": 7_721_324_544,
    "Qwen--Qwen1.5-14B": 14_167_290_880,
    "Qwen--Qwen1.5-32B": 32_512_218_112,
    "Qwen--Qwen1.5-72B": 72_287_920_128,
    "Qwen--Qwen2-0.5B": 494_032_768,
    "Qwen--Qwen2-1.5B": 1_543_714_304,
    "Qwen--Qwen2-7B": 7_615_616_512,
    "Qwen--Qwen2-72B": 72_706_203_648,
    "Qwen--Qwen2.5-3B": 3_085_938_688,
    "Qwen--Qwen2.5-14B": 14_770_033_664,
    "Qwen--Qwen2.5-32B": 32_763_876_352,
    "Qwen--Qwen3-8B": 8_190_735_360,
    "Qwen--Qwen3-14B": 14_768_307_200,
    "Qwen--Qwen3-32B": 32_762_123_264,
    "microsoft--Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft--Phi-3-medium-4k-instruct": 13_960_238_080,
    "microsoft--Phi-4-mini-instruct": 3_836_021_760,
    "microsoft--phi-4": 14_659_507_200,
    "mistralai--Mistral-7B-v0.1": 7_241_732_096,
    "mistralai--Mistral-7B-v0.3": 7_248_023_552,
    "mistralai--Mistral-Nemo-Base-2407": 12_247_782_400,
    "mistralai--Mistral-Small-24B-Base-2501": 23_572_403_200,
    "mistralai--Ministral-8B-Instruct-2410": 8_019_808_256,
    "nvidia--Nemotron-H-4B-Base-8K": 4_489_223_040,
    "nvidia--Nemotron-H-8B-Base-8K": 8_100_852_736,
    "nvidia--Nemotron-H-47B-Base-8K": 46_791_554_816,
    "nvidia--Nemotron-H-56B-Base-8K": 56_324_350_464,
    "nvidia--NVIDIA-Nemotron-Nano-9B-v2": 8_888_227_328,
    "nvidia--NVIDIA-Nemotron-Nano-12B-v2": 12_310_001_152,
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31_577_940_288,
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-BF16": 120_668_687_360,
    "nvidia--Llama-3_3-Nemotron-Super-49B-v1": 49_867_145_216,
    "LiquidAI--LFM2-1.2B": 1_170_340_608,
    "openai--gpt-oss-20b": 20_914_757_184,
    "openai--gpt-oss-120b": 116_829_156_672,
    "HuggingFaceTB--SmolLM2-135M": 134_515_008,
    "HuggingFaceTB--SmolLM2-360M": 361_821_120,
    "HuggingFaceTB--SmolLM2-1.7B": 1_711_376_384,
    "codellama--CodeLlama-7b-hf": 6_738_546_688,
    "meta-llama--Llama-2-7b-hf": 6_738_415_616,
    "meta-llama--Llama-2-13b-hf": 13_015_864_320,
    "meta-llama--Llama-2-70b-hf": 68_976_648_192,
    "meta-llama--Llama-3.1-405B": 405_853_388_800,
    "meta-llama--Llama-3.2-1B": 1_235_814_400,
    "meta-llama--Llama-3.2-3B": 3_212_749_824,
    "meta-llama--Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama--Meta-Llama-3-70B": 70_553_706_496,
    "Qwen--Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "Qwen--Qwen3-30B-A3B": 30_532_122_624,
    "Qwen--Qwen3-235B-A22B": 235_093_634_560,
    "CohereForAI--c4ai-command-r-v01": 34_980_831_232,
    "CohereForAI--c4ai-command-r7b-12-2024": 8_028_033_024,
    "EleutherAI--gpt-neox-20b": 20_554_567_680,
    "EleutherAI--pythia-1.4b": 1_414_647_808,
    "bigcode--starcoder2-7b": 7_173_923_840,
    "facebook--opt-1.3b": 1_315_758_080,
    "google--vaultgemma-1b": 1_038_741_120,
    "microsoft--phi-2": 2_779_683_840,
    "openai-community--gpt2": 124_439_808,
    "openai-community--gpt2-xl": 1_557_611_200,
    "stabilityai--stablelm-2-1_6b": 1_644_515_328,
    "tiiuae--falcon-7b": 6_921_720_704,
    "tiiuae--falcon-11B": 11_102_822_400,
    "allenai--OLMoE-1B-7B-0924": 6_919_161_856,
    "mistralai--Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai--Mixtral-8x22B-v0.1": 140_620_634_112,
    "mistralai--Mamba-Codestral-7B-v0.1": 7_285_403_648,
    "nanochat-students--nanochat-d20": 560_988_160,
}


def bridged(directory, config):
    """The bridge for a folder with nothing but this config.json."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return AutoBridge.from_hf_pretrained(directory)


@pytest.mark.sampled
@pytest.mark.parametrize("name", FILES)
def test_config_round_trip(name, tmp_path):
    problems = configs.round_trip(
        bridged(tmp_path / name, json.loads(FILES[name].read_text())).hf_config
    )
    assert not problems, "\n".join(problems)


@pytest.mark.sampled
@pytest.mark.parametrize("name", FILES)
def test_the_other_spelling_means_the_same(name, tmp_path):
    config = json.loads(FILES[name].read_text())
    one, other = (
        bridged(tmp_path / str(style), spelled).to_megatron_provider(load_weights=False)
        for style, spelled in enumerate((config, respelled(config)))
    )
    problems = configs.different_providers(one, other)
    assert not problems, "\n".join(problems)


def by_size():
    """The models; a plan of more than 5,000 experts takes seconds, so those are slow tests."""
    for name, path in FILES.items():
        config = json.loads(path.read_text())
        config = config.get("text_config", config)
        counts = (
            config.get(key) for key in ("num_experts", "n_routed_experts", "num_local_experts")
        )
        experts = next((count for count in counts if count), 0) * config.get("num_hidden_layers", 0)
        yield pytest.param(name, marks=pytest.mark.slow if experts > 5000 else ())


@pytest.mark.sampled
@pytest.mark.parametrize("name", by_size())
def test_sizes_add_up(name, tmp_path):
    config = bridged(tmp_path / name, json.loads(FILES[name].read_text())).hf_config
    count = count_of(config)
    assert count == COUNTS.get(name, count)
    with torch.device("meta"):
        hf = model_class(config.architectures[0])(config)
    tied = {id(value): value for value in hf.state_dict(keep_vars=True).values()}
    assert count == sum(value.numel() for value in tied.values())


def count_of(config):
    """How many numbers the plan of the model converts, without the layers that transformers has no modules for."""
    bridge = AutoBridge.from_hf_config(config)
    tasks = bridge.plan(bridge.to_megatron_provider(load_weights=False).meta_model()).tasks
    shapes = {
        name: shape for task in tasks if not task.is_copy for name, shape in task.hf_shapes.items()
    }
    beyond = f"layers.{config.num_hidden_layers}."
    return sum(math.prod(shape) for name, shape in shapes.items() if beyond not in name)
