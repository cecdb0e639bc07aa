# SPDX-License-Identifier: Apache-2.0
"""Router losses of fine-tuned experts equal those of a loop over samples, whatever pads or masks them."""

import json
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state

from megatron.bridge import AutoBridge
from megatron.bridge.data.config import FinetuningDatasetConfig, PackedSequenceSpecs
from megatron.bridge.training.config import (
    CheckpointConfig,
    OptimizerConfig,
    SchedulerConfig,
    ValidationConfig,
)
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step
from tests import parity, toy_samples
from tests.refusals import refused
from tests.toy_run import Record, run_toy, sparse_forward_step, toy_config
from tests.workers import leave

VOCABULARY = 96
EXPERTS, TOPK = 4, 2
LENGTHS = [(2, 3), (20, 11), (1, 7), (5, 5), (9, 2), (4, 12), (3, 1), (6, 6)]
"""Tokens of prompts and completions."""
SEED = 1234
LOSSES = {"moe_aux_loss_coeff": 10.0, "moe_z_loss_coeff": 0.1}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=TOPK,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "mlp.gate" in name:
                weight.mul_(20)  # experts that are far from balanced
    directory = tmp_path_factory.mktemp("experts")
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def samples():
    generator = torch.Generator().manual_seed(0)
    return [
        tuple(
            torch.randint(0, VOCABULARY - 1, (size,), generator=generator).tolist()
            for size in lengths
        )
        for lengths in LENGTHS
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, samples):
    directory = tmp_path_factory.mktemp("samples")
    lines = []
    for prompt, completion in samples:
        texts = [" ".join(map(str, tokens)) for tokens in (prompt, completion)]
        lines.append(json.dumps({"prompt": texts[0] + " ", "completion": texts[1]}) + "\n")
    (directory / "training.jsonl").write_text("".join(lines))
    return directory


def train(model_dir, folder, kind, layout, micro=2, seq_length=64, **model):
    """Losses and gradient norm of the first step, whose learning rate is nearly zero."""
    torch.set_num_threads(1)
    provider = AutoBridge.from_hf_pretrained(str(model_dir)).to_megatron_provider(
        load_weights=False
    )
    for name, value in {"moe_token_dispatcher_type": "alltoall", **layout, **model}.items():
        setattr(provider, name, value)
    provider.seq_length = seq_length
    config = toy_config(
        train={"train_iters": 1, "micro_batch_size": micro, "global_batch_size": 8},
        optimizer=OptimizerConfig(lr=1e-12, weight_decay=0.0, clip_grad=0.0),
        scheduler=SchedulerConfig(lr_decay_style="constant"),
        checkpoint=CheckpointConfig(pretrained_checkpoint=str(model_dir)),
        validation=ValidationConfig(),
        dataset=FinetuningDatasetConfig(
            seq_length=seq_length,
            dataset_root=str(folder),
            do_validation=False,
            do_test=False,
            packed_sequence_specs=PackedSequenceSpecs(packed_sequence_size=-1),
            padding_free=kind == "padding-free",
            seed=SEED,
        ),
    )
    config.model = provider
    record = Record()
    try:
        finetune(config, forward_step, [record])
    finally:
        parallel_state.destroy_model_parallel()
    return record.losses[0], record.further, record.grad_norms[0]


def loop(model_dir, samples, micro, balancing, z, masked=True, per_row=False):
    """The same in transformers' model, sample by sample, and microbatch by microbatch."""
    order = np.random.default_rng((SEED, 0)).permutation(len(samples))
    end = VOCABULARY - 1
    samples = [(samples[index][0], [*samples[index][1], end]) for index in order]
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    texts = [prompt + completion for prompt, completion in samples]
    real = sum(len(text) - 1 for text in texts)
    in_loss = sum(len(completion) for _, completion in samples) if masked else real
    total, sums = 0.0, {"lm": 0.0, "balancing": 0.0, "z": 0.0}
    for start in range(0, len(samples), micro):
        by_layer = {}
        for (prompt, _), text in list(zip(samples, texts, strict=True))[start : start + micro]:
            tokens = torch.tensor([text])
            output = model(tokens[:, :-1], output_router_logits=True)
            losses = F.cross_entropy(output.logits[0], tokens[0, 1:], reduction="none")
            first = len(prompt) - 1 if masked else 0
            sums["lm"] += losses[first:].sum()
            for layer, logits in enumerate(output.router_logits):
                by_layer.setdefault(layer, []).append(logits)
        for rows in by_layer.values():
            for logits in rows if per_row else [torch.cat(rows)]:
                scores = logits.softmax(-1)
                counts = torch.zeros(EXPERTS)
                for chosen in scores.topk(TOPK, dim=-1).indices:
                    counts[chosen] += 1
                frequencies = counts / (len(logits) * TOPK)
                loss = EXPERTS * (frequencies * scores.mean(0)).sum()
                sums["balancing"] += len(logits) * loss
                sums["z"] += logits.logsumexp(-1).square().sum()
    total = sums["lm"] / in_loss + (balancing * sums["balancing"] + z * sums["z"]) / real
    total.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    layers = model.config.num_hidden_layers
    further = {
        "load_balancing_loss": sums["balancing"].item() / real / layers,
        "z_loss": sums["z"].item() / real / layers,
    }
    return sums["lm"].item() / in_loss, further, float(norm)


def check(measured, expected, names=("load_balancing_loss", "z_loss")):
    loss, further, norm = measured
    expected_loss, expected_further, expected_norm = expected
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert further == {
        name: [pytest.approx(expected_further[reference], rel=1e-5)]
        for name, reference in zip(names, ("load_balancing_loss", "z_loss"), strict=True)
    }
    assert norm == pytest.approx(expected_norm, rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "seq_length"), [("padded", 32), ("padded", 128), ("padding-free", 32)]
)
@pytest.mark.parametrize("micro", [8, 2])
@pytest.mark.usefixtures("run_in_process")
def test_padding_is_counted_nowhere(model_dir, folder, samples, kind, seq_length, micro):
    measured = train(model_dir, folder, kind, {}, micro, seq_length, **LOSSES)
    check(measured, loop(model_dir, samples, micro, 10.0, 0.1))


@pytest.mark.usefixtures("run_in_process")
def test_rows_have_losses_by_their_tokens(model_dir, folder, samples):
    kind = {"moe_router_load_balancing_type": "seq_aux_loss"}
    measured = train(model_dir, folder, "padded", {}, 4, **LOSSES, **kind)
    expected = loop(model_dir, samples, 4, 10.0, 0.1, per_row=True)
    check(measured, expected, ("seq_load_balancing_loss", "z_loss"))


LAYOUTS = {
    "DP2": {},
    "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2": {"pipeline_model_parallel_size": 2},
    "CP2": {"context_parallel_size": 2},
    "EP2": {"expert_model_parallel_size": 2},
}


@pytest.mark.parametrize("kind", ["padded", "padding-free"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(two_workers, model_dir, folder, samples, layout, kind):
    function = partial(train, model_dir, folder, kind, LAYOUTS[layout], **LOSSES)
    first, last = two_workers.run(function)
    assert first == last
    check(first, loop(model_dir, samples, 2, 10.0, 0.1))


@pytest.mark.usefixtures("run_in_process")
def test_a_step_that_changes_the_mask_is_refused(tmp_path):
    """Router losses are scaled by the mask of the dataset."""
    with refused("num_tokens=", "loss_mask", "model.moe_aux_loss_coeff=0"):
        run_toy({"model": parity.EXPERTS, "train": {"train_iters": 1}}, sparse_forward_step)


def further_layers(folder, kind, layout):
    """Losses and gradient norm of a step of a model with experts in a layer of multi-token prediction."""
    torch.set_num_threads(1)
    model = parity.EXPERTS | {"mtp_num_layers": 1, "moe_aux_loss_coeff": 1.0} | layout
    train = {"train_iters": 1, "micro_batch_size": 2, "global_batch_size": 8}
    blocks = {
        "dataset": toy_samples.dataset(folder, kind),
        "optimizer": OptimizerConfig(lr=1e-12, weight_decay=0.0, clip_grad=0.0),
        "scheduler": SchedulerConfig(lr_decay_style="constant"),
        "validation": ValidationConfig(),
    }
    blocks["dataset"].do_validation = blocks["dataset"].do_test = False
    record = run_toy({"model": model, "train": train, **blocks})
    return record.losses[0], record.further, record.grad_norms[0]


@pytest.fixture(scope="module")
def further(tmp_path_factory):
    folder = toy_samples.write_samples(tmp_path_factory.mktemp("further"))
    expected = further_layers(folder, "padding-free", {})
    leave()
    return folder, expected


@pytest.mark.usefixtures("run_in_process")
def test_padding_is_not_counted_in_further_layers(further):
    folder, expected = further
    check_equal(further_layers(folder, "padded", {}), expected)


@pytest.mark.parametrize("kind", ["padded", "padding-free"])
@pytest.mark.parametrize("layout", ["TP2+SP", "CP2"])
def test_layouts_of_further_layers(two_workers, further, layout, kind):
    folder, expected = further
    first, last = two_workers.run(further_layers, folder, kind, LAYOUTS[layout])
    assert first == last
    check_equal(first, expected)


def check_equal(measured, expected):
    assert measured[0] == pytest.approx(expected[0], rel=1e-5)
    for name, (value,) in expected[1].items():
        assert measured[1][name] == [pytest.approx(value, rel=1e-5)], name
    assert measured[2] == pytest.approx(expected[2], rel=1e-4)
