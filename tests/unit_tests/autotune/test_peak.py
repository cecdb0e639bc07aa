# SPDX-License-Identifier: Apache-2.0
"""Estimated activations against the live storages of a real pipeline stage in Megatron-Core's schedule."""

import dataclasses

import pytest

from megatron.bridge.autotune import activations, meta_model
from megatron.bridge.autotune.search.price import Pricer
from megatron.bridge.autotune.search.search import candidate_of
from megatron.bridge.backends.kernels import eager
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from tests.unit_tests.autotune.measured import peak
from tests.unit_tests.autotune.models import FAMILIES, provider
from tests.unit_tests.autotune.test_memory import configured

PP, VP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def stage_config(family, layers, **values):
    model = provider(family, layers, bf16=True, **values)
    model.bias_activation_fusion = model.resolved().bias_activation_fusion  # as this machine can
    config = configured(model)
    config.train.global_batch_size = 8
    return config.resolve(values.get(PP, 1)).config


CASES = [
    ("llama", 4, {}, 0),
    ("llama", 4, {"position_embedding_type": "none"}, 0),
    ("llama", 4, {PP: 2}, 0),
    ("llama", 4, {PP: 2}, 1),
    ("llama", 8, {PP: 2, VP: 2}, 0),
    ("llama", 8, {PP: 2, VP: 2, **FULL}, 0),
    ("deepseek_v3", 4, {}, 0),
    ("deepseek_v3", 4, FULL, 0),
    ("deepseek_v3", 4, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}, 0),
    ("qwen3_moe", 4, {}, 0),
    ("qwen3_moe", 4, FULL, 0),
    ("qwen3_moe", 8, {PP: 2, VP: 2, **FULL}, 0),
    ("qwen3_moe", 4, {"moe_latent_size": 64}, 0),
    ("gpt_oss", 4, {}, 0),
    ("gpt_oss", 4, FULL, 0),
    ("gemma2", 4, {}, 0),
    ("gemma2", 4, FULL, 0),
    ("mistral", 4, {}, 0),
    ("llama", 4, {"mtp_num_layers": 1}, 0),
    ("deepseek_v3", 4, {"mtp_num_layers": 1, PP: 2}, 1),
    ("deepseek_v3", 4, {"mtp_num_layers": 1, **FULL}, 0),
    ("nemotron_h", 4, {}, 0),
    ("nemotron_h", 4, FULL, 0),
    ("qwen3_next", 4, {}, 0),
    ("qwen3_next", 4, FULL, 0),
]


def within_bars(estimate, measured):
    """At most 8 % too high, and never 3 % too low, so that what is said to fit does."""
    return 0.97 * measured <= estimate <= 1.08 * measured


@pytest.mark.sampled
@pytest.mark.parametrize(("family", "layers", "values", "stage"), CASES)
def test_peak_is_that_of_a_real_stage(monkeypatch, family, layers, values, stage):
    monkeypatch.setattr(eager, "CHUNK", 1 << 13)  # a block of logits would be all logits of a toy
    config = stage_config(family, layers, **values)
    stages = values.get(PP, 1)
    chunks = meta_model.stage_chunks(config.model)[stage]
    estimate = activations.activation_bytes(config, chunks, stage, stages)
    assert within_bars(estimate, peak(config, stage, 8))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "values"),
    [("llama", {}), ("llama", FULL), ("qwen3_moe", {}), ("qwen3_moe", FULL), ("nemotron_h", {})],
    ids=lambda value: value if isinstance(value, str) else "full recomputation" if value else "",
)
@pytest.mark.parametrize(
    "peft",
    [LoRA(dim=32), DoRA(dim=8), LoRA(target_modules=["all-linear"], dim=8)],
    ids=["LoRA", "DoRA", "parts"],
)
def test_peak_with_adapters_is_that_of_a_real_model(monkeypatch, peft, family, values):
    """Frozen layers keep no input for a weight's gradient, and nothing before the first adapter (Nemotron-H's scan).

    DoRA keeps outputs, and the scale of each expert's token.
    """
    monkeypatch.setattr(eager, "CHUNK", 1 << 13)
    config = dataclasses.replace(stage_config(family, 4, **values), peft=peft)
    (chunks,) = meta_model.stage_chunks(config.model, peft)
    estimate = activations.activation_bytes(config, chunks, 0, 1)
    assert within_bars(estimate, peak(config, 0, 2))


def test_recomputed_experts_leave_no_graph_behind():
    """A dispatcher that kept the router's weights would hold the gradients of all layers' inputs."""
    stream = config_output_bytes(stage_config("qwen3_moe", 4, **FULL))
    few, many = (peak(stage_config("qwen3_moe", layers, **FULL), 0, 2) for layers in (4, 8))
    assert many - few < 4 * 1.15 * stream


def test_outputs_of_stages_are_deallocated():
    """Each microbatch in flight would keep its output: Megatron-LM frees it after sending."""
    freed = stage_config("llama", 8, **{PP: 2, VP: 4})
    kept = stage_config("llama", 8, **{PP: 2, VP: 4}, deallocate_pipeline_outputs=False)
    assert freed.model.resolved().deallocate_pipeline_outputs
    chunks = meta_model.stage_chunks(freed.model)[0]
    in_flight = sum(activations.microbatches_in_flight(freed, 0, 2))
    held = [activations.activation_bytes(config, chunks, 0, 2) for config in (freed, kept)]
    output = config_output_bytes(freed)
    assert held[1] - held[0] == in_flight * output


def config_output_bytes(config):
    return config.dataset.seq_length * config.train.micro_batch_size * config.model.hidden_size * 2


def test_loss_does_not_add_to_the_backward_pass():
    config = stage_config("llama", 4)
    (chunks,) = meta_model.stage_chunks(config.model)
    found = {moment.name: moment for moment in activations.moments(config, chunks, 0, 1)}
    assert set(found) == {"loss", "backward of chunk 0"}
    assert activations.activation_bytes(config, chunks, 0, 1) == max(
        moment.total for moment in found.values()
    )


FORWARD = [
    ("llama", {}),  # the loss
    ("llama", {"vocab_size": 128}),  # an MLP
    ("llama", {"vocab_size": 128, "intermediate_size": 64, "num_key_value_heads": 8}),  # attention
    ("qwen3", {"vocab_size": 128}),  # norms of queries
    ("qwen3_moe", {}),
    ("qwen3_moe", {"moe_intermediate_size": 512}),
    ("gpt_oss", {}),
    ("deepseek_v3", {}),
    ("deepseek_v3", {"moe_intermediate_size": 512}),
]


@pytest.mark.parametrize(("family", "values"), FORWARD)
def test_a_pass_that_keeps_nothing_needs_what_is_predicted(monkeypatch, family, values):
    monkeypatch.setitem(FAMILIES, family, FAMILIES[family] | values)
    config = stage_config(family, 4)
    predicted = Pricer(config, 1, "H100 80GB").forward_only(candidate_of(config))
    assert peak(config, 0, 2, forward_only=True) == pytest.approx(predicted, rel=0.05)
