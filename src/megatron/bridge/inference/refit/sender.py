# SPDX-License-Identifier: Apache-2.0
"""The sending side of a weight update: send weights to engines on this machine through shared memory."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from megatron.bridge.inference.engine import Running
from megatron.bridge.inference.refit import packing
from megatron.bridge.inference.refit.canary import SCORING, Canary
from megatron.bridge.inference.refit.packing import SharedBuffer
from megatron.bridge.inference.refit.replacement import Begin, Bucket, Finish, WeightStep
from megatron.bridge.inference.refit.stream import BUCKET_BYTES, WeightInfo, WeightStream
from megatron.bridge.utils.distributed import rank
from megatron.bridge.utils.errors import UserError


@dataclass(frozen=True)
class RefitReport:
    tensors: int  # number of tensors
    bytes: int  # size of all tensors
    seconds: float  # duration without the canary
    difference: float | None = (
        None  # largest difference of the canary's log-probabilities, if there is a canary
    )


def send_weights(
    stream: WeightStream,
    take: Callable[[WeightStep], object] | None,
    bucket_bytes: int = BUCKET_BYTES,
    changed_only: bool = False,
    running: Running = "abort",
) -> RefitReport:
    """Send the weights once; every rank of the trainer must call this.

    ``take`` passes a step to the receiver and returns when it is done; it is None on all ranks except 0. Shared memory
    of ``bucket_bytes`` holds two buckets; a larger tensor uses as much as it needs. ``changed_only`` skips tensors that
    have not changed since the last call; ``running`` says what to do with running texts.
    """
    push = (
        None if take is None else partial(_send_weights, take, bucket_bytes, changed_only, running)
    )
    return sent(stream, push, changed_only)


def sent(
    stream: WeightStream,
    push: Callable[[list[WeightInfo], Iterator[Any]], None] | None,
    changed_only: bool,
) -> RefitReport:
    """Call ``push`` on rank 0 with the functions of ``WeightStream.writes``; other ranks send their parts."""
    if push is not None and rank() != 0:
        raise UserError(
            f"rank {rank()} of the trainer has a receiver: give it on rank 0, which gets the weights"
        )
    start = time.perf_counter()
    tasks = stream.changed() if changed_only else None
    infos = stream.metadata(tasks)
    writes = stream.writes(tasks)
    try:
        if push is not None and infos:
            push(infos, writes)
    finally:  # also after an error, because other ranks wait for this one
        for _ in writes:
            pass
    if changed_only:
        stream.mark_sent()
    return RefitReport(len(infos), sum(info.bytes for info in infos), time.perf_counter() - start)


def _send_weights(
    take: Callable[[WeightStep], object],
    bucket_bytes: int,
    changed_only: bool,
    running: Running,
    infos: list[WeightInfo],
    writes: Iterator[Callable[[Tensor], None]],
) -> None:
    buckets = packing.layout(infos, bucket_bytes)
    buffer = SharedBuffer(packing.buffer_bytes(buckets))
    try:
        take(Begin(infos, bucket_bytes, buffer.path, buffer.size, changed_only, running))
    finally:
        buffer.unlink()
    with ThreadPoolExecutor(1) as receiver:  # reads a bucket while the next one is filled
        taken: list[Future[object]] = []
        for index, bucket in enumerate(buckets):
            for slot in bucket:
                next(writes)(slot.view(buffer.bytes))
            if taken:
                taken[-1].result()
            taken.append(receiver.submit(take, Bucket(index)))
        taken[-1].result()
    take(Finish())


class Refit:
    """Update an engine, which some ranks of the trainer own, with the weights in training, and verify the result."""

    def __init__(
        self,
        llm: Any,
        stream: WeightStream,
        chunks: Sequence[Any],
        canary: Canary,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._llm = llm
        self._stream = stream
        self._chunks = chunks
        self._canary = canary
        self._bucket_bytes = bucket_bytes

    def __call__(self, changed_only: bool = False, running: Running = "abort") -> RefitReport:
        """Send the weights, or only those changed since the last call; every rank of the trainer must call this."""
        expected = self._canary.trainer_logprobs(self._chunks)
        take = None if self._llm is None else self._llm.replace_weights
        report = send_weights(self._stream, take, self._bucket_bytes, changed_only, running)
        if self._llm is None:
            return report
        assert rank() == 0, "rank 0 owns the engine"
        scored = self._llm.generate(self._canary.prompts, SCORING)
        logprobs = [
            token_logprob.logprob
            for completions in scored
            for token_logprob in completions[0].prompt_logprobs
        ]
        difference = self._canary.check(expected, logprobs)
        return RefitReport(report.tensors, report.bytes, report.seconds, difference)
