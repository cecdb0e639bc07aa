# SPDX-License-Identifier: Apache-2.0
"""Forward pass, loss and backward pass on the meta device, whose tensors have no numbers.

A tensor that is made on the CPU raises an error when it meets the others, and so does whatever reads a number on
the host, for which a GPU would have to finish its queue. Only the dispatcher of experts does so, by design.
"""

from dataclasses import replace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from megatron.bridge import AutoBridge
from megatron.bridge.backends.cpu.without_memory import one_rank
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.vlm_step import forward_step
from megatron.bridge.utils.errors import UserError
from tests.families import harness
from tests.families.own_models import model_class
from tests.families.rows import ROWS
from tests.families.vision.rows import ROWS as VISION_ROWS
from tests.families.vision.samples import positions_of
from tests.workers import leave

IN_CI = {
    *(
        "afmoe",
        "cohere2",
        "deci",
        "deepseek_v3",
        "gemma2",
        "gemma3",
        "gemma4",
        "glm4_moe_next_tokens",
        "gpt2",
        "gpt_oss",
    ),
    *("granitemoe", "lfm2_moe", "llama_biases", "ministral3", "nemotron_h_experts", "olmo2", "phi"),
    *(
        "phi3_long_rope_over_part_of_a_head",
        "qwen2_tied_windows",
        "qwen3_5_moe",
        "qwen3_next",
        "vaultgemma",
    ),
}
NAMES = [pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in ROWS]
META = torch.device("meta")
READ_BY_TRANSFORMERS = (
    *("mistral3", "ministral3_vl", "ministral3_vl_tied"),
    "idefics3",
    "smolvlm",
    "nemotron_h_omni",
    "nemotron_h_omni_experts",
    *("gemma4_vl", "gemma4_vl_small", "gemma4_vl_experts", "gemma4_unified"),
)  # docs/gpu.md names them


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    assert ROWS.keys() >= IN_CI
    monkeypatch.setattr(torch.cuda, "current_device", lambda: META)
    monkeypatch.setattr(token_dispatcher, "sort_chunks_by_idxs", unsorted)
    monkeypatch.setattr(MTPLossAutoScaler, "main_loss_backward_scale", torch.tensor(1.0))
    for dispatcher in (
        token_dispatcher.MoEAlltoAllTokenDispatcher,
        token_dispatcher.MoEAllGatherTokenDispatcher,
    ):
        monkeypatch.setattr(
            dispatcher, "dispatch_postprocess", with_even_counts(dispatcher.dispatch_postprocess)
        )


def unsorted(rows, split_sizes, sorted_idxs, probs=None, fused=False):
    """Shapes do not depend on the order."""
    return rows.clone(), None if probs is None else probs.clone()


def with_even_counts(dispatch):
    """The counts of tokens, which the dispatcher reads on the host: as many for each expert."""

    def call(self, *arguments, **options):
        rows, _, probs = dispatch(self, *arguments, **options)
        counts = torch.full((self.num_local_experts,), rows.shape[0] // self.num_local_experts)
        counts[0] += rows.shape[0] - counts.sum()
        return rows, counts, probs

    return call


def built(row):
    kind = model_class(row.model)
    config = kind.config_class(**row.config)
    config.architectures = [kind.__name__]
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    for key, value in harness.settings(provider, {}, row.provider).items():
        setattr(provider, key, value)
    return provider.meta_model(), config.get_text_config().vocab_size


def step(chunk, vocabulary, **more):
    ids = torch.randint(0, vocabulary, (2, 40)).to(META)
    positions = torch.empty(2, 40, dtype=torch.long, device=META)
    losses = chunk(input_ids=ids, position_ids=positions, attention_mask=None, labels=ids, **more)
    losses.mean().backward()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_made_or_read_on_the_cpu(name):
    (chunk,), vocabulary = built(ROWS[name])
    step(chunk, vocabulary)
    missing = [
        key for key, value in chunk.named_parameters() if value.requires_grad and value.grad is None
    ]
    assert not [key for key in missing if "expert" not in key], missing


@pytest.mark.parametrize("name", ["llama_biases", "gpt_oss", "deepseek_v3"])
def test_adapters_are_where_their_layers_are(name):
    chunks, vocabulary = built(ROWS[name])
    LoRA(dim=4, target_modules=["linear_proj", "linear_fc1", "linear_fc2"])(chunks)
    step(chunks[0], vocabulary)


@pytest.mark.parametrize("name", ["llava", "internvl"])
def test_the_image_in_the_place_of_none_goes_where_the_tower_is(name):
    (chunk,), vocabulary = built(VISION_ROWS[name])
    chunk._dummy = {
        key: torch.ones(value.shape, device="cpu") for key, value in chunk._dummy.items()
    }
    step(chunk.train(), vocabulary, media_rows=torch.full((2, 40), -1))


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_sizes_that_transformers_reads_on_the_device(name):
    with pytest.raises((NotImplementedError, UserError), match=r"nonzero|meta"):
        test_sizes_of_images_are_read_on_the_host(name)


@pytest.mark.parametrize("name", [name for name in VISION_ROWS if name not in READ_BY_TRANSFORMERS])
def test_sizes_of_images_are_read_on_the_host(name):
    image_step(VISION_ROWS[name])


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_no_rank_is_asked_for_sizes_of_images(name):
    leave()  # an earlier test in this process may have left its group
    row = VISION_ROWS[name]
    with one_rank(0, 2), torch.device("cpu"):
        try:
            image_step(replace(row, provider={**row.provider, "tensor_model_parallel_size": 2}))
        finally:
            parallel_state.destroy_model_parallel()


def image_step(row):
    (chunk,), _ = built(row)
    sample = row.samples(chunk.vision.config)[1]
    batch = {
        "tokens": sample.ids,
        "labels": sample.labels,
        "loss_mask": torch.ones(sample.ids.shape),
        "position_ids": positions_of(sample, row.mrope),
        "attention_mask": None,
        "media": row.for_model(sample.media),
    }
    losses, reduce = forward_step(iter([batch]), chunk.train())
    reduce(losses)[0].backward()
    assert not [
        key for key, value in chunk.named_parameters() if value.requires_grad and value.grad is None
    ]


def test_a_tensor_on_the_cpu_would_be_found():
    (chunk,), vocabulary = built(ROWS["llama_biases"])
    chunk.decoder.final_layernorm.register_forward_hook(
        lambda module, inputs, out: out + torch.ones(out.shape[-1])
    )
    with pytest.raises(RuntimeError, match="device"):
        step(chunk, vocabulary)


def test_reading_a_number_would_be_found():
    (chunk,), vocabulary = built(ROWS["llama_biases"])
    chunk.decoder.final_layernorm.register_forward_hook(
        lambda module, inputs, out: out * out.sum().item()
    )
    with pytest.raises(RuntimeError, match="meta"):
        step(chunk, vocabulary)
