# SPDX-License-Identifier: Apache-2.0
"""The engine's side of a server: it accepts requests between steps, and reports the results of each step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron.bridge.inference.adapter_changes import AdapterChanges
from megatron.bridge.inference.engine import Engine, InferenceJob
from megatron.bridge.inference.requests import (
    FinishReason,
    Sampling,
    TokenLogprob,
    encode_experts,
)
from megatron.bridge.utils.distributed import broadcast_object
from megatron.bridge.utils.errors import UserError

IDLE_SECONDS = 1.0  # how long rank 0 waits for a request while the other ranks wait for rank 0


@dataclass(frozen=True)
class Submit:
    id: int
    prompt: list[int]
    sampling: Sampling


@dataclass(frozen=True)
class Cancel:
    id: int


@dataclass(frozen=True)
class LoadAdapter:
    """Load the adapter in a directory."""

    id: int
    name: str
    path: str


@dataclass(frozen=True)
class UnloadAdapter:
    """Unload an adapter, which is accepted when its last text has ended."""

    id: int
    name: str


Command = Submit | Cancel | LoadAdapter | UnloadAdapter


@dataclass(frozen=True)
class Accepted:
    id: int


@dataclass(frozen=True)
class RefusedRequest:
    """The engine cannot compute a request."""

    id: int
    message: str


@dataclass(frozen=True)
class ChoiceProgress:
    """The new tokens of one choice in one step."""

    id: int
    choice: int
    piece: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    text_offsets: list[int] = field(default_factory=list)  # of ``tokens`` that have a text
    cached_tokens: int = 0  # tokens of the prompt that were not computed again
    routed_experts: str | None = None


Event = Accepted | RefusedRequest | ChoiceProgress


@dataclass(frozen=True)
class Load:
    """Load of the engine.

    Attributes:
        running: Texts that are computed.
        waiting: Texts that wait.
        caches: The fraction of the caches in use.
        prefix_queries: Tokens of prompts so far for which cached prefixes were looked up.
        prefix_hits: Tokens of these that were not computed again.
        drafted: Draft tokens that were computed so far.
        accepted: Draft tokens that became tokens of their texts.
    """

    running: int = 0
    waiting: int = 0
    caches: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass
class _Sent:
    """The part of a job that has been reported."""

    job: InferenceJob
    text: int = 0
    tokens: int = 0
    logprobs: int = 0
    prompt_logprobs: int = 0


def run(llm: Any, receive: Callable[[float], list[Command]]) -> Iterator[tuple[list[Event], Load]]:
    """Serve until the process ends, on every rank; ``receive`` returns the commands on rank 0."""
    loop = EngineLoop(llm.engine, llm.adapter_changes)
    while True:
        commands = broadcast_object(receive(0.0 if loop.is_busy else IDLE_SECONDS))
        yield [*loop.apply(commands), *loop.step()], loop.load()


class EngineLoop:
    """The jobs of an engine by request; the engine's context is entered, and no other object submits to it.

    Args:
        engine: The engine.
        adapter_changes: Loads and unloads adapters; None if they are fixed.
    """

    def __init__(self, engine: Engine, adapter_changes: AdapterChanges | None = None) -> None:
        self._engine = engine
        self._adapter_changes = adapter_changes
        self._unloading: dict[str, int] = {}  # name of the adapter -> request that waits for it
        self._sent: dict[int, list[_Sent]] = {}

    @property
    def is_busy(self) -> bool:
        return not self._engine.is_idle

    def apply(self, commands: list[Command]) -> Iterator[Event]:
        for command in commands:
            if isinstance(command, Cancel):
                for sent in self._sent.pop(command.id, ()):
                    self._engine.cancel(sent.job)
            elif isinstance(command, Submit):
                yield self._submit(command)
            else:
                yield from self._change_adapters(command)
        yield from self._end_unloading()

    def _change_adapters(self, command: LoadAdapter | UnloadAdapter) -> Iterator[Event]:
        assert self._adapter_changes is not None, "the server has refused it"
        try:
            if isinstance(command, LoadAdapter):
                self._adapter_changes.load(command.name, command.path)
                yield Accepted(command.id)
            else:
                self._adapter_changes.close(command.name)
                self._unloading[command.name] = command.id
        except UserError as error:
            yield RefusedRequest(command.id, str(error))

    def _end_unloading(self) -> Iterator[Event]:
        """Unload the adapters whose last text has ended."""
        if self._adapter_changes is not None and self._unloading:
            for name in self._adapter_changes.remove_unused():
                yield Accepted(self._unloading.pop(name))

    def _submit(self, command: Submit) -> Event:
        try:
            jobs = self._engine.submit(command.prompt, command.sampling)
        except UserError as error:
            return RefusedRequest(command.id, str(error))
        self._sent[command.id] = [_Sent(job) for job in jobs]
        return Accepted(command.id)

    def step(self) -> Iterator[ChoiceProgress]:
        """Compute a step, if any request is running."""
        if not self.is_busy:
            return
        self._engine.step()
        for request, jobs in list(self._sent.items()):
            for sent in list(jobs):
                progress = _unreported_part(request, sent)
                if progress is not None:
                    yield progress
                if sent.job.is_over:
                    jobs.remove(sent)
            if not jobs:
                del self._sent[request]

    def load(self) -> Load:
        lanes = self._engine.lanes
        size = sum(lane.arena.size for lane in lanes)
        held = sum(lane.held_tokens for lane in lanes)
        return Load(
            running=sum(len(lane.running) for lane in lanes),
            waiting=sum(len(lane.waiting) for lane in lanes),
            caches=held / size if size else 0.0,
            prefix_queries=sum(lane.prefix_queries for lane in lanes),
            prefix_hits=sum(lane.prefix_hits for lane in lanes),
            drafted=self._engine.drafted_tokens,
            accepted=self._engine.accepted_tokens,
        )


def _unreported_part(request: int, sent: _Sent) -> ChoiceProgress | None:
    """Return the part of a job that has not been reported, if any."""
    job = sent.job
    completion = sent.job.completion
    if job.is_over or len(completion.tokens) > sent.tokens:
        text = job.detokenizer.text if job.detokenizer is not None else ""
        offsets = job.detokenizer.offsets if job.detokenizer is not None else []
        logprobs = completion.logprobs[: job.visible_tokens]
        experts = completion.routed_experts
        progress = ChoiceProgress(
            request,
            completion.choice,
            piece=text[sent.text :],
            tokens=completion.tokens[sent.tokens :],
            logprobs=logprobs[sent.logprobs :],
            prompt_logprobs=completion.prompt_logprobs[sent.prompt_logprobs :],
            finish_reason=completion.finish_reason,
            text_offsets=offsets[sent.tokens :],
            cached_tokens=job.text.cached,
            routed_experts=None if experts is None else encode_experts(experts),
        )
        sent.text = len(text)
        sent.tokens = len(completion.tokens)
        sent.logprobs = len(logprobs)
        sent.prompt_logprobs = len(completion.prompt_logprobs)
        return progress
    return None
