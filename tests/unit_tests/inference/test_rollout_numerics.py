# SPDX-License-Identifier: Apache-2.0
"""A training forward pass with the engine's numbers gives the log-probabilities of rollouts bitwise."""

import pytest
import torch

from megatron.bridge.inference.rollout_numerics import RolloutNumerics
from megatron.bridge.utils.errors import UserError
from tests.families import decoding, harness, rollouts
from tests.families.rows import ROWS
from tests.unit_tests.inference.test_batch_invariance import EVEN

BOTH = ("llama_tied", "qwen3_moe", "deepseek_v3")
IN_FLOAT32 = ("qwen3", "gpt_oss", "nemotron_h")
IN_BFLOAT16 = ("gemma2", "gemma4_experts", "lfm2", "olmoe")


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        *((name, bf16) for name in BOTH for bf16 in (False, True)),
        *((name, False) for name in IN_FLOAT32),
        *((name, True) for name in IN_BFLOAT16),
    ],
)
def test_logprobs_are_those_of_rollouts(family_case, name, bf16):
    case = family_case(name)
    model = decoding.decoder(case, "one", bf16=bf16)
    config = decoding.engine_config(case, pack=True, chunk=8)
    assert rollouts.largest_difference(model, config, case.row.config["vocab_size"]) == 0.0


def test_recurrent_layers_whose_widths_are_multiples_of_8(tmp_path, monkeypatch):
    monkeypatch.setitem(ROWS, EVEN.name, EVEN)
    case = harness.make_reference(EVEN, tmp_path / "even")
    model = decoding.decoder(case, "one", bf16=True)
    config = decoding.engine_config(case, pack=True, chunk=8)
    assert rollouts.largest_difference(model, config, case.row.config["vocab_size"]) == 0.0


def test_unpacked_weights_and_large_chunks(family_case):
    case = family_case("qwen3")
    model = decoding.decoder(case, "one", bf16=True)
    config = decoding.engine_config(case)
    assert rollouts.largest_difference(model, config, 101, exact=False) > 0
    assert rollouts.largest_difference(model, config, 101) == 0.0


def training_step(case, recompute, exact, labeled=True):
    """Output and gradients of a step on the tokens of rollouts."""
    model = decoding.decoder(case, "one")
    (chunk,) = model
    completions = rollouts.rollouts(model, decoding.engine_config(case), 101)
    tokens, labels, positions, packed, _ = rollouts.pack(completions)
    for name, value in recompute.items():
        setattr(chunk.decoder.config, name, value)
    chunk.train()
    inputs = {"packed_seq_params": packed, "labels": labels if labeled else None}
    if exact:
        prompts = [len(completion.prompt_tokens) for completion in completions]
        with RolloutNumerics(model, vocabulary=101) as numerics:
            with numerics.microbatch(prompts):
                output = chunk(tokens, positions, None, **inputs)
            output.float().square().mean().backward()
    else:
        output = chunk(tokens, positions, None, **inputs)
        output.float().square().mean().backward()
    return output, {name: weight.grad for name, weight in chunk.named_parameters()}


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe"])
def test_gradients_are_those_of_training(family_case, name):
    """In float32 they differ by rounding from those of the usual forward pass, and recomputation changes no bit."""
    case = family_case(name)
    output, gradients = training_step(case, {}, exact=True)
    usual_output, usual_gradients = training_step(case, {}, exact=False)
    torch.testing.assert_close(output, usual_output, rtol=1e-5, atol=1e-5)
    for weight, gradient in usual_gradients.items():
        torch.testing.assert_close(gradients[weight], gradient, rtol=1e-3, atol=1e-5)
    again, recomputed = training_step(case, FULL, exact=True)
    assert torch.equal(again, output)
    for weight, gradient in gradients.items():
        assert torch.equal(recomputed[weight], gradient)


def test_logits_have_the_engines_values(family_case):
    """Without labels, a chunk returns logits; their log-softmax is bitwise that of completions."""
    case = family_case("llama_tied")
    logits, _ = training_step(case, {}, exact=True, labeled=False)
    completions = rollouts.rollouts(
        decoding.decoder(case, "one"), decoding.engine_config(case), 101
    )
    *_, bounds = rollouts.pack(completions)
    rows, expected = rollouts.rollout_logprobs(completions, bounds)
    generated = [token for completion in completions for token in completion.tokens]
    logprobs = logits.detach()[0, :, :101].float().log_softmax(-1)
    assert torch.equal(logprobs[rows, generated], expected)


def test_given_experts_are_chosen(family_case):
    case = family_case("qwen3_moe")
    model = decoding.decoder(case, "one")
    (chunk,) = model
    tokens = torch.arange(3, 27)[None]
    experts = torch.rand(24, 3, 6, generator=torch.Generator().manual_seed(0)).argsort(-1)[..., :3]
    experts[-1] = -1
    maps = []
    for module in chunk.modules():
        if type(module).__name__ == "TopKRouter":
            module.register_forward_hook(lambda *call: maps.append(call[-1][1]))
    with RolloutNumerics(model, vocabulary=101) as numerics, numerics.microbatch([8], experts):
        chunk(tokens, torch.arange(24)[None], None, labels=tokens)
    assert len(maps) == 6  # in both passes
    for index, chosen in enumerate(maps):
        expected = torch.zeros(23, 6).scatter(1, experts[:-1, index % 3], 1.0).bool()
        assert torch.equal(chosen[:23], expected)


def test_what_cannot_be_exact_is_refused(family_case):
    model = decoding.decoder(family_case("llama_tied"), "one")
    (chunk,) = model
    tokens = torch.zeros(2, 8, dtype=torch.long)
    with RolloutNumerics(model, vocabulary=101) as numerics:
        with numerics.microbatch([4]), pytest.raises(UserError, match="pack its sequences"):
            chunk(tokens, tokens, None, labels=tokens)
        with (
            numerics.microbatch([4, 4]),
            pytest.raises(UserError, match="2 prompt lengths for 1 sequences"),
        ):
            chunk(tokens[:1], tokens[:1], None, labels=tokens[:1])
    chunk.config.hidden_dropout = 0.1
    with pytest.raises(UserError, match=r"hidden_dropout=0\.1"):
        RolloutNumerics(model, vocabulary=101)
