# SPDX-License-Identifier: Apache-2.0
"""The peak of a real pipeline stage: its modules in Megatron-Core's schedule, live storages counted."""

import gc

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.language_module import language_module

from megatron.bridge.autotune import meta_model
from megatron.bridge.autotune.vision_tower import LiveBytes
from megatron.bridge.models.model_provider import silenced
from tests.one_stage import run_stage


def peak(config, stage, microbatches, forward_only=False):
    """Bytes that a step of ``stage`` holds at most, weights and gradients left out, on one process.

    Args:
        config: A resolved config without tensor, context and expert parallelism.
        stage: Pipeline rank.
        microbatches: Of the step.
        forward_only: Run no backward pass.
    """
    model, length = config.model, config.dataset.seq_length
    with meta_model.as_stage(model, stage), silenced(language_module):
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        chunks = model.resolved().build_chunks()
        if config.peft is not None:
            config.peft(chunks)
        for chunk in chunks:
            chunk.to(chunk.config.params_dtype)
            for parameter in chunk.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        tokens = torch.randint(0, model.vocab_size, (1, length))
        positions = torch.arange(length)[None]

        def step(_, chunk):
            output = chunk(
                input_ids=tokens, position_ids=positions, attention_mask=None, labels=tokens
            )
            return output, lambda losses: (losses.float().mean(), {})

        resolved = chunks[0].config
        gc.collect()
        stages = model.pipeline_model_parallel_size
        with LiveBytes() as live, torch.set_grad_enabled(not forward_only):
            run_stage(step, chunks, resolved, stages, stage, microbatches, length, forward_only)
    return live.peak
