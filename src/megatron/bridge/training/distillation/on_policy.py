# SPDX-License-Identifier: Apache-2.0
"""The student learns from the teacher on its own completions (https://arxiv.org/abs/2306.13649).

In some of the steps the last answer of each sample is replaced by one that the student writes, so that it is corrected
where it goes wrong, and not only along the answers of others.
"""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.bridge.data.finetuning.rows import packed_batch
from megatron.bridge.data.records.samples import Sample
from megatron.bridge.inference.requests import NOT_FINITE, Sampling
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config.blocks.objectives import DistillConfig
from megatron.bridge.training.config.resolve.data import sequence_multiple
from megatron.bridge.training.generation import derive_seed, open_engine
from megatron.bridge.training.state import BatchIterator, Run
from megatron.bridge.training.step.refilled_batches import RefilledBatches
from megatron.bridge.utils.errors import UserError

REPORT_NAME = "own answers"
"""In reports, the fraction of steps that trained on answers of the student."""


class OnPolicyBatches(Callback):
    """Gives each step its microbatches, with answers of the student in a fraction of the steps.

    Which steps these are, and the answers, depend on the seed and the number of the step alone, so a resumed run has
    the same ones.
    """

    def __init__(self, settings: DistillConfig) -> None:
        self._settings = settings
        self._data: BatchIterator | None = None
        self._batches: list[RefilledBatches] = []
        self._is_own_step = False

    def on_train_start(self, context: Run) -> None:
        assert context.data.train is not None, "a run without data"
        self._data = context.data.train
        self._batches = [RefilledBatches() for _ in context.model]
        context.train_batches = list(self._batches)

    def on_train_step_start(self, context: Run) -> None:
        assert self._data is not None, "on_train_start comes first"
        microbatches = [next(self._data) for _ in range(context.num_microbatches)]
        chance = random.Random(derive_seed(context.config.rng.seed, context.progress.step))
        self._is_own_step = chance.random() < self._settings.on_policy_fraction
        if self._is_own_step:
            microbatches = self._with_own_answers(context, microbatches)
        for batches in self._batches:
            batches.refill(microbatches)

    def on_grads_ready(self, context: Run) -> None:
        for report in context.reports:
            value = torch.tensor([float(self._is_own_step), 1.0], dtype=torch.float64)
            report[REPORT_NAME] = value.to(torch.cuda.current_device())

    def _with_own_answers(
        self, run: Run, microbatches: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return microbatches of the same samples whose last answers the student has written."""
        samples = [samples_of(batch) for batch in microbatches]
        prompts = [prompt_of(sample) for batch in samples for sample in batch]
        answers = iter(self._complete(run, prompts))
        multiple = sequence_multiple(run.config, padding_free=True)
        completed: list[dict[str, Any]] = []
        for batch, batch_samples in zip(microbatches, samples, strict=True):
            new = [with_answer(sample, next(answers)) for sample in batch_samples]
            # a microbatch without trained tokens has nothing to replace
            completed.append(packed_batch(new, run.tokenizer.eod, multiple) if new else batch)
        return completed

    def _complete(self, run: Run, prompts: list[list[int]]) -> list[list[int]]:
        """Return the student's answers to the prompts of this data-parallel rank; empty where there is no room."""
        group: Any = parallel_state.get_data_parallel_group()
        by_rank: list[list[list[int]]] = [[] for _ in range(group.size())]
        dist.all_gather_object(by_rank, prompts, group)
        first = sum(map(len, by_rank[: group.rank()]))
        everywhere = [prompt for rank_prompts in by_rank for prompt in rank_prompts]
        seed = derive_seed(run.config.rng.seed, run.progress.step)
        with open_engine(run, self._settings) as engine:
            jobs = []
            for index, prompt in enumerate(everywhere):
                free_tokens = run.config.dataset.seq_length - len(prompt)
                sampling = Sampling(
                    max_new_tokens=min(self._settings.max_completion_length, free_tokens),
                    temperature=self._settings.completion_temperature,
                    seed=derive_seed(seed, index),
                )
                jobs.append(engine.submit(prompt, sampling)[0] if free_tokens > 0 else None)
            for _ in engine.run():
                pass
            completions = [None if job is None else job.completion for job in jobs]
        answers: list[list[int]] = []
        for completion in completions[first : first + len(prompts)]:
            if completion is not None and completion.finish_reason == "error":
                raise UserError(f"step {run.progress.step + 1}: {NOT_FINITE}")
            answers.append([] if completion is None else list(completion.tokens))
        return answers


def samples_of(batch: dict[str, Any]) -> list[Sample]:
    """Return the samples of a microbatch that have trained tokens, in order."""
    if batch.get("media"):
        raise UserError(
            "distill.on_policy_fraction needs data without images: set it to 0, or remove the images"
        )
    tokens = batch["tokens"]
    bounds = [0, tokens.shape[1]]
    if "cu_seqlens" in batch:
        bounds = batch["cu_seqlens"].tolist()
    samples: list[Sample] = []
    for row, mask, labels in zip(tokens, batch["loss_mask"], batch["labels"], strict=True):
        for start, end in pairwise(bounds):
            trained = mask[start:end].numpy() > 0
            if not trained.any():
                continue
            # the label of the last trained token ends the sample; padding follows
            last = start + int(trained.nonzero()[0][-1])
            sequence = np.append(row[start : last + 1].numpy(), labels[last].item())
            in_loss = np.append(False, trained[: last + 1 - start])
            samples.append(Sample(sequence.astype(np.int32), in_loss))
    return samples


def prompt_of(sample: Sample) -> list[int]:
    """Return the tokens before the last answer: before the last trained tokens that follow each other."""
    return sample.tokens[: _start_of_answer(sample)].tolist()


def with_answer(sample: Sample, answer: Sequence[int]) -> Sample:
    """Return the sample with another last answer, which alone is trained; the same sample without one."""
    if not answer:
        return sample
    start = _start_of_answer(sample)
    tokens = np.append(sample.tokens[:start], np.array(answer, np.int32))
    trained = np.arange(len(tokens)) >= start
    return Sample(tokens, trained)


def _start_of_answer(sample: Sample) -> int:
    untrained_positions = np.flatnonzero(~sample.trained)
    return int(untrained_positions[-1]) + 1
