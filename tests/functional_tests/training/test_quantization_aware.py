# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training: against a naive loop over transformers' model, under any layout, up to the export."""

import copy

import pytest
import torch
import torch.nn.functional as F

from megatron.bridge import AutoBridge
from megatron.bridge.backends.low_bit.rounding import ROUNDINGS
from megatron.bridge.models.hf_pretrained.written_formats import WRITTEN_FORMATS, outline
from megatron.bridge.training.config import (
    DistributedDataParallelConfig,
    DistributedInitConfig,
    OptimizerConfig,
    SchedulerConfig,
)
from tests import parity
from tests.functional_tests.checkpoint.runs import run_to
from tests.toy_run import SEQUENCE, first_weight, run_toy, save_llama, whole_weights

SIZES = {"fp8-block": 8, "int4": 16, "int4-awq": 16}
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
}


def qat(name, **others):
    return {"qat": name, "qat_group_size": SIZES.get(name), "qat_inputs": False, **others}


def read_as_stored(name, weights):
    """The weights of one Megatron parameter as an export stores them, read again, with gradients of the weights."""
    row = WRITTEN_FORMATS[name]
    largest = torch.stack([weight.detach().abs().amax() for weight in weights]).amax()
    rounded = []
    for weight in weights:
        stored_as = outline(row, "a.weight", tuple(weight.shape), weight.dtype, SIZES.get(name, 0))
        given = weight.detach()
        stored = stored_as.tensor.encode(given, largest if row.shares_scale else None)
        read = torch.empty_like(given)
        stored_as.tensor.fill(stored | stored_as.constants, (), read)
        rounded.append(weight + (read - given))
    return rounded


def round_naively(model, name):
    """Let the linear layers of transformers' decoder compute with rounded weights."""
    for layer in model.model.layers:
        modules = {**dict(layer.self_attn.named_children()), **dict(layer.mlp.named_children())}
        alone = tuple((key,) for key in ("o_proj", "down_proj"))
        for group in (*FUSED, *alone):
            members = [modules[key] for key in group]
            rounded = read_as_stored(name, [member.weight for member in members])
            for member, weight in zip(members, rounded, strict=True):
                member.forward = lambda x, weight=weight: F.linear(x, weight)


@pytest.mark.parametrize("name", WRITTEN_FORMATS)
def test_loss_and_gradients_are_those_of_a_naive_loop(run_in_process, tmp_path, name):
    from transformers import AutoModelForCausalLM

    source = save_llama(tmp_path / "hf")
    tokens = torch.randint(96, (2, SEQUENCE))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    rounded = copy.deepcopy(model)
    round_naively(rounded, name)
    expected_logits = rounded(tokens).logits
    expected_logits.square().mean().backward()

    bridge = AutoBridge.from_hf_pretrained(source)
    provider = bridge.to_megatron_provider()
    for field, value in qat(name).items():
        setattr(provider, field, value)
    (chunk,) = provider.provide_distributed_model(wrap_with_ddp=False)
    positions = torch.arange(SEQUENCE).expand(2, -1)
    logits = chunk(input_ids=tokens, position_ids=positions, attention_mask=None)
    logits.square().mean().backward()

    scale = float(expected_logits.detach().abs().max())
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-5 * scale)
    plain_logits = model(tokens).logits
    assert (plain_logits - expected_logits).abs().max() > 1e-3 * scale, "nothing was rounded"
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.copy_(parameter.grad)
    gradients = dict(bridge.export_hf_weights([chunk], show_progress=False))
    for key, parameter in rounded.named_parameters():
        bound = 1e-5 * float(parameter.grad.abs().max())
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=0, atol=bound)


LAYOUTS = {
    "int8, TP2+SP": ("int8", {}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
    "fp8-tensor, TP2": ("fp8-tensor", {}, {"tensor_model_parallel_size": 2}, {}),
    "nvfp4, TP2": ("nvfp4", {}, {"tensor_model_parallel_size": 2}, {}),
    "fp8-block, TP2": ("fp8-block", {}, {"tensor_model_parallel_size": 2}, {}),
    "int4, PP2": ("int4", {}, {"pipeline_model_parallel_size": 2}, {}),
    "mxfp8, PP2+VP2": (
        "mxfp8",
        {},
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        {},
    ),
    "int8, CP2": ("int8", {}, {"context_parallel_size": 2}, {}),
    "mxfp4, EP2": ("mxfp4", EXPERTS, {"expert_model_parallel_size": 2}, {}),
    "int8, experts, TP2": (
        "int8",
        EXPERTS,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {},
    ),
    "int8, DP2": ("int8", {}, {}, {}),
    "int8, FSDP2": ("int8", {}, {}, {"dist": DistributedInitConfig(use_torch_fsdp2=True)}),
    "int8, Megatron-FSDP": (
        "int8",
        {},
        {},
        {"ddp": DistributedDataParallelConfig(use_megatron_fsdp=True)},
    ),
    "int8, recomputed": (
        "int8",
        {},
        {
            "tensor_model_parallel_size": 2,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        {},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_round_as_one_process(two_workers, run_in_process, name):
    """After one step: rounding is not continuous, so that further steps would hang on the last bits of weights."""
    format_name, model, layout, blocks = LAYOUTS[name]
    one_step = {
        "train": {"train_iters": 1},
        "optimizer": OptimizerConfig(
            lr=1e-2, weight_decay=0.1, clip_grad=0.5, adam_eps=parity.EPSILON
        ),
        "scheduler": SchedulerConfig(),
    }
    reference = run_toy({"model": {**model, **qat(format_name)}, **one_step})
    records = two_workers.run(
        run_toy, {"model": {**model, **qat(format_name), **layout}, **one_step, **blocks}
    )
    figures = parity.compare(records, reference)
    assert figures.losses < 1e-6
    assert figures.grad_norms < 1e-6
    assert figures.weights < 1e-6


def test_a_resumed_run_is_the_undisturbed_one(run_in_process, tmp_path):
    arguments = {"model": qat("int8", qat_inputs=True, hidden_dropout=0.1)}
    undisturbed = run_to(None, 4, arguments)
    run_to(tmp_path, 2, arguments)
    resumed = run_to(tmp_path, 4, arguments)
    assert resumed == undisturbed


def test_data_parallel_ranks_round_inputs_as_one_process(two_workers, run_in_process):
    arguments = {"model": qat("int8", qat_inputs=True), "train": {"train_iters": 1}}
    figures = parity.compare(two_workers.run(run_toy, arguments), run_toy(arguments))
    assert figures.losses < 1e-6
    assert figures.grad_norms < 1e-6


def test_steps_that_no_rounded_weight_shows_add_up_in_the_parameters(run_in_process):
    arguments = {
        "model": qat("int4"),
        "train": {"train_iters": 3},
        "optimizer": OptimizerConfig(lr=1e-7, weight_decay=0.0),
        "scheduler": SchedulerConfig(lr_decay_style="constant"),
    }
    record = run_toy(arguments)
    key = "decoder.layers.self_attention.linear_proj.weight"
    weight = whole_weights([record])[key]
    start = first_weight(key, weight.shape)
    assert not torch.equal(weight, start)
    for before, after in zip(start, weight, strict=True):
        assert (before != after).float().mean() > 0.5
        is_other_code = rounded(before) != rounded(after)
        assert is_other_code.float().mean() < 0.01


def rounded(weight):
    rounding = ROUNDINGS["int4"]
    return rounding.round(weight, rounding.magnitudes(weight, SIZES["int4"]), SIZES["int4"])
