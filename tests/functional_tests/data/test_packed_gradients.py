# SPDX-License-Identifier: Apache-2.0
"""Packed, padding-free and padded training take the same step, and it is the right one.

The right one is transformers' own model in float64, one sample at a time. ``tests/parity.py`` has the layouts.
"""

import json

import pytest
import torch
from transformers import LlamaForCausalLM

from megatron.bridge import AutoBridge
from megatron.bridge.data.config import DatasetRequest
from megatron.bridge.data.loaders import build_iterators
from megatron.bridge.data.tokenizer import NullTokenizer
from megatron.bridge.training.config import (
    DistributedDataParallelConfig,
    OptimizerConfig,
    SchedulerConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from tests.toy_run import VOCABULARY, run_toy, whole_weights
from tests.toy_samples import LENGTHS, dataset, write_samples
from tests.workers import leave

SAMPLES = len(LENGTHS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_samples(tmp_path_factory.mktemp("samples"))


def batches(folder, kind, micro):
    """All samples once."""
    config = dataset(folder, kind)
    tokenizer = NullTokenizer(VOCABULARY)
    probe = config.build(DatasetRequest((1, 0, 0), tokenizer)).train
    rows = len(probe.rows)
    train = build_iterators(config, tokenizer, (rows, 0, 0), micro, rows).train
    return [next(train) for _ in range(rows // micro)]


# ------------------------------------------------------------------------------------------------- against float64


def reference_gradients(directory, folder):
    """Of the mean over all learnt tokens, from the text of the samples alone."""
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float64)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for line in (folder / "training.jsonl").read_text().splitlines():
        record = json.loads(line)
        prompt, completion = (
            [int(word) for word in record[key].split()] for key in ("prompt", "completion")
        )
        ids = torch.tensor([prompt + completion + [VOCABULARY - 1]])
        labels = torch.tensor([[-100] * len(prompt) + completion + [VOCABULARY - 1]])
        logits = model(input_ids=ids).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum")
        count += len(completion) + 1
    (total / count).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def our_gradients(bridge, model, found):
    """The same of our model in double precision, under transformers' names."""
    total, count = 0, 0
    for batch in found:
        output, loss_function = forward_step(iter([batch]), model)
        loss, tokens, _ = loss_function(output)
        total, count = total + loss.double(), count + tokens
    (total / count).backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad.clone()
        parameter.grad = None
    return {
        name: weight.double()
        for name, weight in bridge.export_hf_weights([model], show_progress=False)
    }


@pytest.mark.parametrize(("kind", "micro"), [("packed", 1), ("padding-free", 4), ("padded", 4)])
def test_gradients_equal_transformers_in_double_precision(hf_directory, folder, kind, micro):
    bridge = AutoBridge.from_hf_pretrained(str(hf_directory))
    (model,) = bridge.to_megatron_model(load_weights=True, wrap_with_ddp=False)
    found = batches(folder, kind, micro)
    if kind == "packed":
        assert len(found) <= SAMPLES / 2
    ours = our_gradients(bridge, model.double(), found)
    expected = reference_gradients(hf_directory, folder)
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (ours[name] - gradient).norm() / gradient.norm()
        assert error <= 1e-6, f"{name}: {error:.1e}"


# ------------------------------------------------------------------------------------------------------- one step


def one_step(folder, kind, layout=None, micro=1):
    """Weights after one step of plain gradient descent on all samples."""
    model = dict(layout or {})
    data = dataset(folder, kind)
    rows = len(data.build(DatasetRequest((1, 0, 0), NullTokenizer(VOCABULARY))).train.rows)
    if kind == "packed":
        data = dataset(folder, kind, multiple=4 if model.get("context_parallel_size") else None)
        rows = len(data.build(DatasetRequest((1, 0, 0), NullTokenizer(VOCABULARY))).train.rows)
    return run_toy(
        {
            "model": model,
            "train": {"train_iters": 1, "micro_batch_size": micro, "global_batch_size": rows},
            "dataset": data,
            "optimizer": OptimizerConfig(
                optimizer="sgd",
                lr=1.0,
                min_lr=1.0,
                weight_decay=0.0,
                clip_grad=0.0,
                sgd_momentum=0.0,
            ),
            "scheduler": SchedulerConfig(lr_decay_style="constant"),
            "ddp": DistributedDataParallelConfig(
                use_distributed_optimizer=False
            ),  # it knows Adam only
            "validation": ValidationConfig(),
        }
    )


@pytest.fixture(scope="module")
def padded_step(folder):
    """The step of one process on padded samples."""
    torch.set_num_threads(1)
    record = one_step(folder, "padded", micro=2)
    leave()
    return record


def check(records, expected):
    weights, reference = whole_weights(records), whole_weights([expected])
    assert weights.keys() == reference.keys()
    for name, weight in reference.items():
        assert (weights[name] - weight).abs().max() < 2e-6, name
    # what a step is: larger by orders than what is allowed between two of them
    losses = [record.losses for record in records]
    assert losses == [pytest.approx(expected.losses, abs=1e-6)] * len(losses)
    assert expected.grad_norms[0] > 0.1


@pytest.mark.parametrize(
    ("kind", "micro"), [("packed", 1), ("padding-free", 2), ("padding-free", 4)]
)
def test_one_process(folder, padded_step, kind, micro):
    record = one_step(folder, kind, micro=micro)
    leave()
    check([record], padded_step)


def test_multi_token_prediction_stays_within_samples(folder):
    """In one microbatch, of which Megatron-Core weighs the extra losses by its own number of tokens."""
    torch.set_num_threads(1)
    weights = []
    for kind in ("padded", "padding-free"):
        weights.append(
            whole_weights([one_step(folder, kind, {"mtp_num_layers": 1}, micro=SAMPLES)])
        )
        leave()
    assert any("mtp" in name for name in weights[0])
    for name, weight in weights[0].items():
        assert (weights[1][name] - weight).abs().max() < 2e-6, name
