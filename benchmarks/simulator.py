# SPDX-License-Identifier: Apache-2.0
"""The tuner's simulated pipelines against Megatron-Core's schedules over gloo, with chunks that only sleep.

``python -m benchmarks simulator`` runs 12 pipelines of 2 and 4 processes. Each forward and backward pass of a chunk
sleeps for its own time, between 20 and 200 ms, so the step is what the order of passes makes of these times.
"""

import argparse
import random
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from benchmarks.tune_ranking import in_ranks
from megatron.bridge.autotune.time.schedule import Pipeline
from megatron.bridge.autotune.time.simulate import PassTimes, makespan

SEQUENCE, HIDDEN = 8, 8
PIPELINES = {
    "1F1B": Pipeline(2, 8),
    "fewer microbatches than stages": Pipeline(4, 3),
    "4 stages": Pipeline(4, 8),
    "forward only": Pipeline(4, 8, forward_only=True),
    "interleaved": Pipeline(2, 6, chunks=2, group=2),
    "3 chunks": Pipeline(2, 6, chunks=3, group=2),
    "larger groups": Pipeline(2, 8, chunks=2, group=4),
    "an incomplete group": Pipeline(2, 8, chunks=2, group=3),
    "4 stages interleaved": Pipeline(4, 8, chunks=2, group=4),
    "4 stages, larger groups": Pipeline(4, 12, chunks=2, group=6),
    "interleaved, forward only": Pipeline(2, 6, chunks=2, group=2, forward_only=True),
    "one group": Pipeline(4, 4, chunks=3, group=4),
}


def times_of(pipeline: Pipeline, seed: int) -> PassTimes:
    draw, shape = random.Random(seed), (pipeline.stages, pipeline.chunks)
    forward, backward = (
        tuple(tuple(draw.uniform(0.02, 0.2) for _ in range(shape[1])) for _ in range(shape[0]))
        for _ in range(2)
    )
    return PassTimes(forward, backward)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], None, None


class SleepingChunk(nn.Module):
    """A chunk with the interface that the schedules use; the first one has an input of its own."""

    def __init__(self, config: Any, forward: float, backward: float) -> None:
        from megatron.core.enums import ModelType

        super().__init__()
        self.config, self.seconds, self.input = config, (forward, backward), None
        self.model_type = ModelType.encoder_or_decoder
        self.start = nn.Parameter(torch.zeros(SEQUENCE, 1, HIDDEN))

    def set_input_tensor(self, tensor: Any) -> None:
        self.input = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self) -> Tensor:
        x = self.start * 1.0 if self.input is None else self.input
        return _Sleep.apply(x, *self.seconds)  # type: ignore[return-value]


def _step(_: Any, chunk: SleepingChunk) -> Any:
    return chunk(), lambda output: (output.sum(), {})


def step_seconds(pipeline: Pipeline, times: PassTimes, rounds: int) -> float:
    """Return the median seconds of a step from a barrier to the end of the last rank."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.transformer_config import TransformerConfig

    virtual = pipeline.chunks if pipeline.chunks > 1 else None
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pipeline.stages, virtual_pipeline_model_parallel_size=virtual
    )
    config = TransformerConfig(
        num_layers=pipeline.stages * pipeline.chunks,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        pipeline_model_parallel_size=pipeline.stages,
        virtual_pipeline_model_parallel_size=virtual,
        microbatch_group_size_per_vp_stage=pipeline.group if virtual else None,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    pairs = zip(times.forward[stage], times.backward[stage], strict=True)
    chunks: Any = [SleepingChunk(config, *pair) for pair in pairs]
    run, found = schedules.get_forward_backward_func(), []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        run(
            forward_step_func=_step,
            data_iterator=[None] * pipeline.chunks if virtual else None,
            model=chunks,
            num_microbatches=pipeline.microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=pipeline.forward_only,
        )
        took = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        found.append(took.item())
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Simulated against real pipelines of sleeping chunks."
    )
    parser.add_argument("--rounds", type=int, default=3)
    rounds, errors = parser.parse_args().rounds, []
    for seed, (name, pipeline) in enumerate(PIPELINES.items()):
        times = times_of(pipeline, seed)
        simulated = makespan(pipeline, times)
        measured = in_ranks(pipeline.stages, step_seconds, pipeline, times, rounds)
        errors.append(simulated / measured - 1)
        print(
            f"  {measured:7.3f} s  simulated {simulated:7.3f} s  {errors[-1]:+6.2%}  {name}",
            flush=True,
        )
    print(f"{len(errors)} pipelines: at most {max(map(abs, errors)):.2%} off")


if __name__ == "__main__":
    main()
