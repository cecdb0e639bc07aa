# SPDX-License-Identifier: Apache-2.0
"""The sending side: send a live Megatron model's weights to engines on this machine, through shared memory."""

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
    """Statistics of what was sent."""

    tensors: int  # how many
    bytes: int  # of them
    seconds: float  # that it took, without the canary
    difference: float | None = None  # largest difference of the canary's log-probabilities; None without a canary


def send_weights(
    stream: WeightStream,
    take: Callable[[WeightStep], object] | None,
    bucket_bytes: int = BUCKET_BYTES,
    changed_only: bool = False,
    running: Running = "abort",
) -> RefitReport:
    """Send weights once; every rank of the trainer calls this.

    ``take`` passes a step to the receiver and returns when it is done; it is None on all ranks but 0. ``bucket_bytes``
    of shared memory hold two buckets; a larger tensor takes what it needs. ``changed_only`` skips tensors that have not
    changed since the last call; ``running`` says what to do with running texts.
    """
    push = None if take is None else partial(_send, take, bucket_bytes, changed_only, running)
    return sent(stream, push, changed_only)


def sent(
    stream: WeightStream, push: Callable[[list[WeightInfo], Iterator[Any]], None] | None, changed_only: bool
) -> RefitReport:
    """Call ``push`` on rank 0 with the functions of ``WeightStream.writes``; other ranks send their parts."""
    if push is not None and rank() != 0:
        raise UserError(f"rank {rank()} of the trainer has a receiver: weights come to rank 0, so give it there")
    start = time.perf_counter()
    tasks = stream.changed() if changed_only else None
    infos = stream.metadata(tasks)
    writes = stream.writes(tasks)
    try:
        if push is not None and infos:
            push(infos, writes)
    finally:  # the other ranks wait for this one, also after an error
        for _ in writes:
            pass
    if changed_only:
        stream.mark_sent()
    return RefitReport(len(infos), sum(info.bytes for info in infos), time.perf_counter() - start)


def _send(
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
    """Keeps an engine, which some ranks of the trainer own, at the weights of a model that trains, and proves it."""

    def __init__(
        self, llm: Any, stream: WeightStream, chunks: Sequence[Any], canary: Canary, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._llm, self._stream, self._chunks, self._canary = llm, stream, chunks, canary
        self._bucket_bytes = bucket_bytes

    def __call__(self, changed_only: bool = False, running: Running = "abort") -> RefitReport:
        """Send the weights, or those that changed since the last such call; every rank of the trainer calls this."""
        expected = self._canary.trainer_logprobs(self._chunks)
        take = None if self._llm is None else self._llm.replace_weights
        report = send_weights(self._stream, take, self._bucket_bytes, changed_only, running)
        if self._llm is None:
            return report
        assert rank() == 0, "rank 0 owns the engine"
        found = self._llm.generate(self._canary.prompts, SCORING)
        logprobs = [one.logprob for completions in found for one in completions[0].prompt_logprobs]
        difference = self._canary.check(expected, logprobs)
        return RefitReport(report.tensors, report.bytes, report.seconds, difference)
