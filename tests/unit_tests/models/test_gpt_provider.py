# SPDX-License-Identifier: Apache-2.0
"""The provider: declared values stay as they were, and a model is built from a resolved copy."""

import dataclasses
import json
import os

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state

from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.models import model_provider
from megatron.bridge.models.chunk_info import chunk_info
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.model_provider import PreWrapHook
from megatron.bridge.utils.config.serialize import from_plain, to_plain
from megatron.bridge.utils.errors import UserError
from tests.refusals import refused


def toy(**changes):
    values = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        "vocab_size": 101,
        "seq_length": 16,
        "normalization": "RMSNorm",
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return GPTModelProvider(**values | changes)


@pytest.fixture(autouse=True)
def fresh_groups():
    yield
    parallel_state.destroy_model_parallel()


def logits(chunk, tokens):
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return chunk(input_ids=tokens, position_ids=positions, attention_mask=None)


def test_nothing_is_derived_before_the_model_is_built():
    provider = toy(kv_channels=None)
    declared = dataclasses.asdict(provider)
    provider.finalize()
    assert dataclasses.asdict(provider) == declared
    assert provider.resolved().kv_channels == 8


def test_a_value_set_after_creation_takes_effect():
    provider = toy()
    provider.hidden_size, provider.num_layers = 64, 3
    (chunk,) = provider.provide_distributed_model(wrap_with_ddp=False)
    assert chunk.config.kv_channels == 16
    assert len(chunk.decoder.layers) == 3


def test_the_chunk_is_causal_and_gives_logits_batch_first():
    torch.manual_seed(0)
    (chunk,) = toy().provide_distributed_model(wrap_with_ddp=False)
    tokens = torch.randint(0, 101, (2, 16))
    changed = tokens.clone()
    changed[:, 10:] = (tokens[:, 10:] + 1) % 101
    before, after = logits(chunk, tokens), logits(chunk, changed)
    assert before.shape == (2, 16, 101)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_half_precision_follows_the_flag():
    (chunk,) = toy().provide_distributed_model(wrap_with_ddp=False, bf16=True)
    assert {parameter.dtype for parameter in chunk.parameters()} == {torch.bfloat16}
    assert logits(chunk, torch.zeros(1, 16, dtype=torch.long)).dtype == torch.float32


def test_a_flag_that_is_switched_off_gives_full_precision():
    (chunk,) = toy(bf16=True, params_dtype=torch.bfloat16).provide_distributed_model(
        wrap_with_ddp=False, bf16=False
    )
    assert {parameter.dtype for parameter in chunk.parameters()} == {torch.float32}


def test_hooks_run_in_order_and_may_replace_the_chunks():
    provider, calls = toy(), []
    provider.register_pre_wrap_hook(lambda chunks: calls.append("second"))
    provider.register_pre_wrap_hook(lambda chunks: calls.append("first"), prepend=True)
    provider.register_post_wrap_hook(lambda chunks: [*chunks, *chunks])
    chunks = provider.provide_distributed_model(wrap_with_ddp=True)
    assert calls == ["first", "second"]
    assert len(chunks) == 2


@pytest.mark.parametrize(("promise", "initialized"), [(False, True), (True, False)])
def test_only_a_hook_that_promises_to_fill_the_model_saves_its_initialization(promise, initialized):
    provider, calls = toy(), []
    hook = PreWrapHook(lambda chunks: calls.append("filled"), fills_every_parameter=promise)
    (chunk,) = provider.provide_distributed_model(
        wrap_with_ddp=False, pre_wrap_hook=hook.then(lambda chunks: calls.append("frozen"))
    )
    assert calls == ["filled", "frozen"]
    assert chunk.config.perform_initialization is initialized
    assert provider.perform_initialization is True


def test_what_a_provider_carries_is_neither_compared_nor_written():
    provider, plain = toy(), toy()
    provider.hf_config = object()
    provider.register_pre_wrap_hook(lambda chunks: None)
    assert provider == plain
    assert to_plain(provider) == to_plain(plain)
    with pytest.raises(UserError, match="hf_config"):
        from_plain({**to_plain(plain), "hf_config": {}})


def test_a_chunk_has_one_record_wrapped_or_not():
    (wrapped,) = toy(bf16=True).provide_distributed_model()
    chunk_info(wrapped).filled_from = "somewhere"
    assert chunk_info(unwrap(wrapped)).filled_from == "somewhere"
    assert not any("chunk_info" in name for name in wrapped.state_dict())


def test_the_vocabulary_is_padded_only_when_asked():
    assert toy().padded_vocab_size == 101
    assert toy(should_pad_vocab=True, tensor_model_parallel_size=2).padded_vocab_size == 256
    with pytest.raises(UserError, match="vocab_size is not set"):
        _ = toy(vocab_size=None).padded_vocab_size


def test_the_meta_model_takes_no_memory():
    (chunk,) = toy().meta_model()
    assert {parameter.device.type for parameter in chunk.parameters()} == {"meta"}


EXPERTS = {
    "num_moe_experts": 5,
    "moe_ffn_hidden_size": 7,
    "moe_shared_expert_intermediate_size": 11,
}
TP, PP, EP = (f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({TP: 2, "ffn_hidden_size": 53}, f"{TP}=2 does not divide ffn_hidden_size=53"),
        ({TP: 2, **EXPERTS}, f"{TP}=2 does not divide moe_shared_expert_intermediate_size=11"),
        (
            {
                TP: 2,
                **EXPERTS,
                "moe_shared_expert_intermediate_size": 12,
                "expert_tensor_parallel_size": 2,
            },
            "expert_tensor_parallel_size=2 does not divide moe_ffn_hidden_size=7",
        ),
        ({EP: 2, **EXPERTS}, f"{EP}=2 does not divide num_moe_experts=5"),
        (
            {PP: 2, "num_layers": 5, "pipeline_dtype": torch.float32},
            f"{PP}=2 does not divide num_layers=5",
        ),
    ],
)
def test_parallel_sizes_that_do_not_divide_are_refused_by_name(changes, message):
    sequence = {"sequence_parallel": changes.get(TP, 1) > 1}
    with pytest.raises(UserError, match=message):
        toy(**{**changes, **sequence}).build_chunks()


def test_padded_heads_do_not_change_the_function():
    """The padded model equals the declared one, and nothing of the padding ever gets a gradient."""
    plain = toy(num_attention_heads=6, num_query_groups=3, hidden_size=48, add_qkv_bias=True)
    padded = toy(
        num_attention_heads=6,
        num_query_groups=3,
        hidden_size=48,
        add_qkv_bias=True,
        make_query_groups_divisible_by=4,
    )
    (small,), (large,) = (p.provide_distributed_model(wrap_with_ddp=False) for p in (plain, padded))
    assert (
        large.config.num_attention_heads,
        large.config.num_query_groups,
        large.config.kv_channels,
    ) == (8, 4, 8)
    values = dict(small.named_parameters())
    for name, parameter in large.named_parameters():
        value = values[name].detach()
        region = tuple(slice(0, length) for length in value.shape)
        assert parameter.shape == value.shape or not parameter[value.shape[0] :].any()
        parameter.data[region] = value
    tokens = torch.randint(0, 101, (2, 16))
    torch.testing.assert_close(logits(large, tokens), logits(small, tokens))
    logits(large, tokens).square().mean().backward()
    for layer in large.decoder.layers:
        attention = layer.self_attention
        assert not attention.linear_qkv.weight.grad[3 * 4 * 8 :].any()
        assert not attention.linear_qkv.bias.grad[3 * 4 * 8 :].any()
        assert not attention.linear_proj.weight.grad[:, 6 * 8 :].any()


def test_padded_vocabulary_takes_no_part_in_the_loss():
    plain, padded = toy(), toy(should_pad_vocab=True)
    (small,), (large,) = (p.provide_distributed_model(wrap_with_ddp=False) for p in (plain, padded))
    values = dict(small.named_parameters())
    for name, parameter in large.named_parameters():
        parameter.data[: len(values[name])] = values[name].detach()
    tokens = torch.randint(0, 101, (2, 16))
    expected, found = (
        F.cross_entropy(logits(chunk, tokens).mT, tokens) for chunk in (small, large)
    )
    torch.testing.assert_close(found, expected)
    found.backward()
    assert not large.embedding.word_embeddings.weight.grad[101:].any()


@pytest.mark.parametrize("function", [os.system, os.getcwd, json.dumps, int, torch.nn.Linear])
def test_an_activation_that_is_no_function_of_a_tensor_is_refused(function):
    provider = GPTModelProvider(num_layers=1, hidden_size=32, num_attention_heads=4)
    provider.activation_func = function
    with refused("activation_func=", function.__name__, "such as torch.nn.functional.silu"):
        provider.finalize()


@pytest.mark.parametrize("key", ["init_method", "output_layer_init_method"])
@pytest.mark.parametrize("function", [os.getcwd, len, json.dumps, torch.nn.init.constant_])
def test_an_initialization_that_fills_no_tensor_is_refused(key, function):
    provider = GPTModelProvider(num_layers=1, hidden_size=32, num_attention_heads=4)
    setattr(provider, key, function)
    with refused(f"{key}=", function.__name__, "such as torch.nn.init.xavier_uniform_"):
        provider.finalize()


def test_trying_an_initialization_leaves_the_random_state():
    provider = GPTModelProvider(num_layers=1, hidden_size=32, num_attention_heads=4)
    provider.init_method = torch.nn.init.normal_
    before = torch.get_rng_state()
    provider.finalize()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shape", [(1, 1), (4,)])
def test_an_activation_keeps_the_shape(shape):
    provider = GPTModelProvider(num_layers=1, hidden_size=32, num_attention_heads=4)
    provider.activation_func = lambda x: x.new_zeros(shape)
    with refused("activation_func=", "returns no tensor of the same shape"):
        provider.finalize()


def test_an_activation_that_fails_here_for_another_reason_is_left_to_the_run():
    def needs_a_gpu(x):
        raise RuntimeError("no GPU")

    provider = GPTModelProvider(num_layers=1, hidden_size=32, num_attention_heads=4)
    provider.activation_func = needs_a_gpu
    provider.finalize()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the setting may be used there")
def test_a_setting_that_is_not_used_is_named_once(caplog):
    """A dry run resolves the model of each pipeline stage and chunk."""
    model_provider._warn_once.cache_clear()  # other tests of this process
    for layers in (2, 4):
        toy(num_layers=layers, gradient_accumulation_fusion=True).resolved()
    warnings = [text for text in caplog.messages if "model.gradient_accumulation_fusion" in text]
    assert len(warnings) == 1
