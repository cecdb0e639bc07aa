# SPDX-License-Identifier: Apache-2.0
"""Distillation on the student's own answers: against transformers, in all layouts, and resumed."""

import pytest
import torch
from transformers import LlamaForCausalLM

from megatron.bridge import AutoBridge
from megatron.bridge.data.config import DatasetRequest
from megatron.bridge.data.tokenizer import NullTokenizer
from megatron.bridge.training.config import CheckpointConfig, ValidationConfig
from megatron.bridge.training.distill import distill
from megatron.bridge.training.distillation.on_policy import prompt_of, samples_of, with_answer
from tests.toy_distill import Losses, run_student, save_teacher, student_config
from tests.toy_run import VOCABULARY, save_llama
from tests.toy_samples import dataset, write_samples
from tests.workers import forget_model_parallel, leave

TOKENS = 6
LEARN = {
    "ce_weight": 0.0,
    "kl_weight": 1.0,
    "temperature": 1.0,
    "jsd_beta": 0.5,
    "on_policy_fraction": 1.0,
    "max_completion_length": TOKENS,
    "completion_temperature": 1e-7,  # the most likely token, which rounding does not change
}
LAYOUTS = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "sp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32},
    "cp2": {"context_parallel_size": 2},
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_teacher(tmp_path_factory.mktemp("models") / "teacher")


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "student"
    return save_llama(folder, num_hidden_layers=4, initializer_range=0.1)


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    return write_samples(tmp_path_factory.mktemp("samples"))


@pytest.fixture
def one_process():
    yield
    leave()


def rows_of(data):
    return data.build(DatasetRequest((1, 0, 0), NullTokenizer(VOCABULARY))).train.rows


def blocks_of(samples, kind, layout, steps=1, **changes):
    data = dataset(samples, kind, multiple=4 if layout.get("context_parallel_size") else None)
    train = {"train_iters": steps, "micro_batch_size": 1, "global_batch_size": len(rows_of(data))}
    return {
        "model": dict(layout),
        "train": train,
        "dataset": data,
        "validation": ValidationConfig(),
        **changes,
    }


def run(teacher, samples, kind, layout, learn=LEARN):
    record, losses = run_student(teacher, learn, **blocks_of(samples, kind, layout))
    return record, losses.train


def naive_divergence(student, teacher, prompts, eod, longest):
    """The mean Jensen-Shannon divergence over the greedy answers of transformers, in fp64."""
    ours, theirs = (
        LlamaForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (student, teacher)
    )
    values = []
    for prompt in prompts:
        count = min(TOKENS, longest - len(prompt))
        inputs = torch.tensor([prompt])
        with torch.no_grad():
            text = ours.generate(
                inputs, max_new_tokens=count, do_sample=False, eos_token_id=eod, pad_token_id=eod
            )
            places = slice(len(prompt) - 1, text.shape[1] - 1)
            q, p = (model(text).logits[0, places].softmax(-1) for model in (ours, theirs))
        m = (p + q) / 2
        values.append(0.5 * (p * (p / m).log() + q * (q / m).log()).sum(-1))
    return torch.cat(values).mean().item()


def test_a_step_is_that_of_transformers(teacher, student, samples, one_process):
    blocks = blocks_of(samples, "padded", {})
    del blocks["model"]
    prompts = [prompt_of(sample) for sample in samples_of_rows(blocks["dataset"])]
    checkpoint = CheckpointConfig(pretrained_checkpoint=str(student))
    config = student_config(teacher, LEARN, checkpoint=checkpoint, **blocks)
    config.model = AutoBridge.from_hf_pretrained(str(student)).to_megatron_provider(
        load_weights=False
    )
    config.model.calculate_per_token_loss = True
    losses = Losses()
    distill(config, [losses])
    forget_model_parallel()
    eod = NullTokenizer(VOCABULARY).eod
    longest = blocks["dataset"].seq_length
    expected = naive_divergence(student, teacher, prompts, eod, longest)
    assert losses.train[0]["kl loss"] == pytest.approx(expected, rel=1e-5)
    assert losses.train[0]["own answers"] == 1.0


def samples_of_rows(data):
    rows = rows_of(data)
    found = []
    for index in range(len(rows)):
        batch = {
            key: value.unsqueeze(0)
            for key, value in rows[index].items()
            if key in ("tokens", "labels", "loss_mask")
        }
        found += samples_of(batch)
    return found


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_samples_are_read_back_from_their_batch(samples, kind):
    data = dataset(samples, kind)
    rows = rows_of(data)
    found = []
    for index in range(len(rows)):
        row = rows[index]
        batch = {key: row[key].unsqueeze(0) for key in ("tokens", "labels", "loss_mask")}
        found += samples_of(batch | {key: row[key] for key in ("cu_seqlens",) if key in row})
    wanted = [rows.samples[index] for index in range(len(rows.samples))]
    key = lambda sample: (len(sample.tokens), sample.tokens.tolist())  # noqa: E731
    for ours, theirs in zip(sorted(found, key=key), sorted(wanted, key=key), strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.trained.tolist() == theirs.trained.tolist()
        prompt = prompt_of(ours)
        answered = with_answer(ours, [1, 2])
        assert answered.tokens.tolist() == [*prompt, 1, 2]
        assert answered.trained.tolist() == [False] * len(prompt) + [True, True]
        assert with_answer(ours, []) is ours


def test_layouts(teacher, samples, two_workers):
    _, expected = run(teacher, samples, "padded", {})
    leave()
    for name, layout in LAYOUTS.items():
        kind = "packed" if name in ("cp2", "pp2") else "padded"
        for _, losses in two_workers.run(run, teacher, samples, kind, layout):
            assert losses == [pytest.approx(expected[0], rel=2e-6)], name


def sampled_steps(teacher, samples, folder, **train):
    """Six steps with sampled answers in some of them: what each step logs."""
    learn = {**LEARN, "on_policy_fraction": 0.5, "completion_temperature": 1.0}
    checkpoint = CheckpointConfig(save=str(folder), save_interval=2)
    blocks = blocks_of(samples, "padded", {}, steps=6, checkpoint=checkpoint)
    blocks["train"] |= train
    _, losses = run_student(teacher, learn, **blocks)
    return losses.train


def test_resume_is_exact(teacher, samples, tmp_path, one_process):
    expected = sampled_steps(teacher, samples, tmp_path / "whole")
    assert {step["own answers"] for step in expected} == {0.0, 1.0}
    sampled_steps(teacher, samples, tmp_path / "parts", exit_interval=2)
    assert sampled_steps(teacher, samples, tmp_path / "parts") == expected[2:]
