# SPDX-License-Identifier: Apache-2.0
"""Label smoothing and NEFTune: the same numbers in every layout, exact resume, and no effect on evaluations."""

import json
from itertools import pairwise

import pytest
import torch
from transformers.integrations.neftune import neftune_post_forward_hook

from megatron.bridge.checkpoint import paths
from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.data.config import FinetuningDatasetConfig, PackedSequenceSpecs
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import CheckpointConfig, ValidationConfig
from tests.functional_tests.conftest import leave
from tests.refusals import refused
from tests.toy_run import SEQUENCE, run_toy

STEPS = 4
ALPHA = 40.0
LAYOUTS = {
    "tensor": {"tensor_model_parallel_size": 2},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
    "data": {},
}


def arguments(model=None, **train):
    return {
        "model": model or {},
        "train": {"train_iters": STEPS, **train},
        "validation": ValidationConfig(eval_iters=1),
    }


@pytest.mark.parametrize("setting", ["label_smoothing", "neftune_noise_alpha"])
def test_two_processes_learn_what_one_does(two_workers, run_in_process, setting):
    value = {"label_smoothing": 0.1, "neftune_noise_alpha": ALPHA}[setting]
    alone = run_toy(arguments(**{setting: value}))
    without = run_toy(arguments())
    assert abs(alone.losses[0] - without.losses[0]) > 1e-5
    for name, model in LAYOUTS.items():
        records = two_workers.run(run_toy, arguments(model, **{setting: value}))
        assert records[0].losses == pytest.approx(alone.losses, rel=2e-6), name
        assert records[0].grad_norms == pytest.approx(alone.grad_norms, rel=2e-5), name
        assert records[0].held_out == pytest.approx(alone.held_out, rel=2e-6), name


def test_a_resumed_run_has_the_same_noise(run_in_process, tmp_path):
    train = {"neftune_noise_alpha": ALPHA, "label_smoothing": 0.1}
    checkpoint = CheckpointConfig(save=str(tmp_path), save_interval=2)
    undisturbed = run_toy(arguments(**train) | {"checkpoint": checkpoint})
    leave()
    paths.write_tracker(tmp_path, 2)
    resumed = run_toy(arguments(**train) | {"checkpoint": checkpoint})
    assert resumed.losses == undisturbed.losses[2:]
    assert resumed.held_out == undisturbed.held_out


def test_evaluations_are_those_without(run_in_process):
    lengths = {"eval_iters": 1, "eval_interval": 1}
    both = run_toy(
        arguments(neftune_noise_alpha=ALPHA, label_smoothing=0.3)
        | {"validation": ValidationConfig(**lengths)}
    )
    alone = run_toy(arguments(skip_train=True) | {"validation": ValidationConfig(eval_iters=1)})
    # the first step of the warmup has a learning rate of 0, so the weights are those of the start
    assert both.held_out[0] == alone.held_out[0]


class EmbeddingInputs(Callback):
    """What the embedding returns before and after the noise, and the batches."""

    def __init__(self):
        self.clean, self.noisy, self.batches = [], [], []

    def on_train_start(self, context):
        model = unwrap(context.model[0])
        step = context.forward_step

        def watched(batches, *rest):
            batch = next(batches)
            if model.training:
                self.batches.append(batch)
            return step(iter([batch]), *rest)

        context.forward_step = watched
        if context.config.model.tensor_model_parallel_size == 1:
            model.embedding.word_embeddings.register_forward_hook(self._keep_clean)
            model.embedding.register_forward_hook(self._keep_noisy)

    def _keep_clean(self, module, inputs, output):
        if module.training:
            self.clean.append(output.detach().transpose(0, 1))

    def _keep_noisy(self, module, inputs, output):
        if module.training:
            self.noisy.append(output.detach())


@pytest.mark.parametrize("packed", [False, True])
def test_noise_has_the_distribution_of_transformers(run_in_process, tmp_path, packed):
    records = [
        {"prompt": "5 50", "completion": " 60 61" + " 7" * (number % 5 * 2)} for number in range(16)
    ]
    (tmp_path / "training.jsonl").write_text("\n".join(map(json.dumps, records)))
    size = SEQUENCE if packed else -1
    data = FinetuningDatasetConfig(
        dataset_root=str(tmp_path),
        seq_length=SEQUENCE,
        packed_sequence_specs=PackedSequenceSpecs(packed_sequence_size=size),
    )
    seen = EmbeddingInputs()
    model = {"hidden_size": 512, "num_attention_heads": 4, "num_layers": 1}
    train = {"neftune_noise_alpha": ALPHA, "micro_batch_size": 1, "global_batch_size": 2}
    run_toy(
        {
            "model": model,
            "train": {"train_iters": 2} | train,
            "dataset": data,
            "validation": ValidationConfig(),
        },
        callbacks=[seen],
    )
    assert len(seen.noisy) == 4
    drawn = torch.stack(
        [noisy - clean for noisy, clean in zip(seen.noisy, seen.clean, strict=True)]
    )
    assert (drawn[0] != drawn[1]).all(), "microbatches have noise of their own"
    for noise, batch in zip(drawn, seen.batches, strict=True):
        ends = batch["cu_seqlens"].tolist() if packed else [0, SEQUENCE]
        for start, stop in pairwise(ends):
            length = int((~batch["padding_mask"][0, start:stop]).sum())
            if length == 0:
                continue  # padding at the end of a packed row
            expected = noise_of_transformers(length, 512)
            part = noise[start : start + length, 0]
            assert part.abs().max().item() == pytest.approx(expected.abs().max().item(), rel=0.01)
            assert part.std().item() == pytest.approx(expected.std().item(), rel=0.05)
            assert abs(part.mean()) < 4 * expected.std() / (length * 512) ** 0.5


def noise_of_transformers(length, width):
    module = torch.nn.Identity()
    module.neftune_noise_alpha = ALPHA
    return neftune_post_forward_hook(module, None, torch.zeros(1, length, width))[0]


def test_losses_without_tokens_are_refused():
    with refused("train.label_smoothing=0.1", "model.head"):
        run_toy({"model": {"head": "embedding"}, "train": {"label_smoothing": 0.1}})
