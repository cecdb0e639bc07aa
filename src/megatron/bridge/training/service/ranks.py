# SPDX-License-Identifier: Apache-2.0
"""The ranks' side of the training service: one frozen base, which trains adapters and samples from saved ones.

Training and sampling have separate modules with the same weights in memory.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

import megatron.bridge  # noqa: F401 - makes megatron.core usable without a GPU
from megatron.bridge.backends.cpu.device import has_cuda
from megatron.bridge.inference import loading
from megatron.bridge.inference.adapter_bank import AdapterNames
from megatron.bridge.inference.adapter_changes import AdapterChanges
from megatron.bridge.inference.engine import Engine, EngineConfig, InferenceJob
from megatron.bridge.inference.prompts import end_tokens
from megatron.bridge.inference.requests import NOT_FINITE
from megatron.bridge.inference.server.engine_loop import IDLE_SECONDS
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.models.features.multi_token_prediction import drop_mtp_layers
from megatron.bridge.models.gpt_provider import pad_query_groups
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.row_adapters import AdaptableLayers
from megatron.bridge.training.adapter_trainer import AdapterTrainer
from megatron.bridge.training.service.commands import (
    AddModel,
    CancelSample,
    Command,
    Compute,
    Done,
    Event,
    ExportModel,
    LoadModel,
    ModelCommand,
    Refused,
    RemoveModel,
    Sample,
    SaveModel,
    Step,
)
from megatron.bridge.utils import distributed
from megatron.bridge.utils.errors import UserError

_ROWS_ON_CPU, _ROWS_ON_GPU = 1024, 8192  # new tokens in a step of sampling


@dataclass(frozen=True)
class ServiceFacts:
    """What the HTTP process knows of the model."""

    max_context: int
    layers: AdaptableLayers
    has_experts: bool


class ServiceModel:
    """One rank of the base, with its adapters.

    Args:
        path: Hugging Face directory or hub id.
        sizes: Parallel sizes by the names of the provider's fields.
        dtype: Dtype of the base; None takes the checkpoint's.
        tokenizer: Directory or hub id of another tokenizer.
        trust_remote_code: Run Python code of the model's repository.
        max_context: Tokens of a row, or of a prompt and its completion; None takes the model's maximum.
        max_requests: Texts that are sampled at the same time.
        kv_memory: Bytes for the caches of sampling on each rank.
        prefix_reuse: Texts reuse the caches of others that begin with the same tokens.
        micro_batch_size: Rows of a forward pass in training.
        max_adapters: Adapters that are trained at the same time, and as many that are sampled from.
    """

    def __init__(
        self,
        path: str,
        *,
        sizes: Mapping[str, Any],
        dtype: str | None = None,
        tokenizer: str | None = None,
        trust_remote_code: bool = False,
        max_context: int | None = None,
        max_requests: int = 32,
        kv_memory: int = 4 << 30,
        prefix_reuse: bool = True,
        micro_batch_size: int = 4,
        max_adapters: int = 32,
    ) -> None:
        distributed.initialize()
        self._cleanup = ExitStack()
        self.max_adapters = max_adapters
        model = loading.load(
            path,
            sizes,
            dtype,
            adapter="none",
            tokenizer=tokenizer,
            trust_remote_code=trust_remote_code,
        )
        if model.bridge is None:
            raise UserError(
                f"--train needs a Hugging Face model, and {path} is a Megatron checkpoint: export it first with "
                "`megatron-bridge export`"
            )
        self.max_context = max_context or model.max_context
        if not 1 < self.max_context <= model.max_context:
            raise UserError(
                f"--max-context {max_context} must be from 2 to {model.max_context}, the model's maximum"
            )
        self.trainer = AdapterTrainer(
            model.bridge,
            self._make_training_chunks(model.bridge, model.chunks, sizes, dtype),
            micro_batch_size,
        )
        config = EngineConfig(
            self.max_context,
            model.vocabulary,
            frozenset(end_tokens(model.hf, model.folder)),
            kv_memory=kv_memory,
            max_requests=max_requests,
            prefix_reuse=prefix_reuse,
            rows=_ROWS_ON_GPU if has_cuda() else _ROWS_ON_CPU,
            graphs=False,  # adapters come and go all the time
        )
        engine = Engine(model.chunks, config, model.hf, AdapterNames())
        self.engine = self._cleanup.enter_context(engine)
        self.sampler_changes = AdapterChanges(engine, model.bridge, model.chunks, max_adapters)

    def yield_facts(self) -> Iterator[ServiceFacts]:
        """Yield what the HTTP process needs to know."""
        has_experts = bool(self.trainer.config.num_moe_experts)
        layers = self.trainer.adaptable_layers()
        yield ServiceFacts(self.max_context, layers, has_experts)

    def close(self) -> None:
        """Detach the caches."""
        self._cleanup.close()

    def _make_training_chunks(
        self,
        bridge: AutoBridge,
        sampling_chunks: Sequence[Any],
        sizes: Mapping[str, Any],
        dtype: str | None,
    ) -> list[Any]:
        """Return chunks for training whose weights are those of the chunks for sampling, in the same memory."""
        provider = bridge.to_megatron_provider(load_weights=False)
        for name, value in sizes.items():
            setattr(provider, name, value)
        provider.backend = "torch"  # the modules and the numbers of sampling
        provider.seq_length = self.max_context
        if provider.mtp_num_layers:
            drop_mtp_layers(provider)
        if provider.num_moe_experts:
            provider.moe_aux_loss_coeff = 0.0  # routers are frozen
            provider.moe_z_loss_coeff = None
            # Megatron-Core demands it for training experts
            provider.sequence_parallel = provider.tensor_model_parallel_size > 1
        pad_query_groups(provider)
        precision = (
            {} if dtype is None else {"fp16": dtype == "float16", "bf16": dtype == "bfloat16"}
        )
        chunks = provider.provide_distributed_model(wrap_with_ddp=False, **precision)
        for chunk, sampling_chunk in zip(chunks, sampling_chunks, strict=True):
            share_weights(sampling_chunk, chunk)
        return chunks


def share_weights(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Make the parameters and buffers of ``target`` those of ``source``, in the same memory."""
    parameters = dict(source.named_parameters())
    own_parameters = dict(target.named_parameters())
    assert parameters.keys() == own_parameters.keys(), "both are built by one provider"
    for name, parameter in own_parameters.items():
        assert parameter.shape == parameters[name].shape, name
        parameter.data = parameters[name].data
    buffers = dict(source.named_buffers())
    for name, buffer in target.named_buffers():
        buffer.copy_(buffers[name])


def run(service: ServiceModel, receive: Callable[[float], list[Command]]) -> Iterator[list[Event]]:
    """Serve until the process ends, on every rank; ``receive`` returns the commands on rank 0."""
    loop = ServiceLoop(service)
    while True:
        seconds = 0.0 if loop.is_busy else IDLE_SECONDS
        commands = distributed.broadcast_object(receive(seconds))
        yield [*loop.apply(commands), *loop.step()]


class ServiceLoop:
    """Applies commands between the steps of sampling, identically on all ranks.

    Args:
        service: This rank's model.
    """

    def __init__(self, service: ServiceModel) -> None:
        self._trainer = service.trainer
        self._engine = service.engine
        self._most_models = service.max_adapters
        self._samplers = LoadedSamplers(
            service.engine, service.sampler_changes, service.max_adapters
        )
        self._waiting_samples: deque[Sample] = deque()
        self._jobs: dict[int, list[InferenceJob]] = {}

    @property
    def is_busy(self) -> bool:
        """Return whether texts are sampled."""
        return bool(self._waiting_samples) or not self._engine.is_idle

    def apply(self, commands: Sequence[Command]) -> list[Event]:
        """Run commands, those of each model in order."""
        events: list[Event] = []
        queues: dict[str, deque[ModelCommand]] = {}
        for command in commands:
            if isinstance(command, Sample):
                self._waiting_samples.append(command)
            elif isinstance(command, CancelSample):
                self._cancel(command.sample)
            else:
                queues.setdefault(command.model, deque()).append(command)
        while queues:
            events += self._compute(_take_computations(queues.values()))
            for queue in queues.values():
                if queue and not isinstance(queue[0], Compute):
                    events.append(self._run(queue.popleft()))
            queues = {model: queue for model, queue in queues.items() if queue}
        return events

    def _compute(self, commands: Sequence[Compute]) -> list[Event]:
        """Compute the rows of several models in shared passes; a wrong row refuses the rows of its command only."""
        events: list[Event] = []
        accepted: list[Compute] = []
        for command in commands:
            try:
                self._check_rows(command)
                accepted.append(command)
            except UserError as error:
                events.append(Refused(command.id, str(error)))
        if not accepted:
            return events
        rows = [row for command in accepted for row in command.rows]
        trainer = self._trainer
        compute = trainer.forward if accepted[0].forward_only else trainer.forward_backward
        results = compute(rows)
        for command in accepted:
            count = len(command.rows)
            events.append(Done(command.id, results[:count]))
            results = results[count:]
        return events

    def _check_rows(self, command: Compute) -> None:
        if not command.rows:
            raise UserError("data is empty: give at least one datum")
        for index, row in enumerate(command.rows):
            try:
                self._trainer.check_row(row)
            except UserError as error:
                raise UserError(f"data[{index}]: {error}") from error

    def _run(self, command: ModelCommand) -> Event:
        try:
            return Done(command.id, self._run_on_model(command))
        except UserError as error:
            return Refused(command.id, str(error))

    def _run_on_model(self, command: ModelCommand) -> Any:
        trainer = self._trainer
        match command:
            case AddModel():
                self._check_room(command.model)
                method = LoRA(
                    target_modules=list(command.target_modules),
                    dim=command.rank,
                    alpha=command.alpha,
                    seed=command.seed,
                )
                trainer.add(command.model, method)
            case RemoveModel():
                if command.model in trainer.names:
                    trainer.remove(command.model)
            case Step():
                return trainer.step(command.model, command.settings)
            case SaveModel():
                trainer.save(command.model, command.directory)
            case LoadModel():
                self._check_room(command.model)
                trainer.load(command.model, command.directory, command.with_optimizer)
                return trainer.method(command.model).dim
            case ExportModel():
                trainer.export(command.model, command.directory)
            case Compute():
                raise AssertionError("computed with those of other models")
        return None

    def _check_room(self, model: str) -> None:
        count = len(self._trainer.names)
        if model not in self._trainer.names and count >= self._most_models:
            raise UserError(
                f"--max-adapters {self._most_models}: as many models are trained, so close one first, or start the "
                "server with more"
            )

    def _cancel(self, sample: int) -> None:
        for job in self._jobs.get(sample, ()):
            self._engine.cancel(job)
        for command in list(self._waiting_samples):
            if command.id == sample:
                self._waiting_samples.remove(command)

    def step(self) -> list[Event]:
        """Compute a token of the sampled texts, if there are any; return the samples that have ended."""
        events = self._start_samples()
        if not self._engine.is_idle:
            self._engine.step()
        for sample, jobs in list(self._jobs.items()):
            if all(job.is_over for job in jobs):
                del self._jobs[sample]
                completions = [job.completion for job in jobs]
                is_broken = any(item.finish_reason == "error" for item in completions)
                event = Refused(sample, NOT_FINITE) if is_broken else Done(sample, completions)
                events.append(event)
        return events

    def _start_samples(self) -> list[Event]:
        """Submit the samples whose adapters can be loaded."""
        events: list[Event] = []
        still_waiting: deque[Sample] = deque()
        for command in self._waiting_samples:
            try:
                name = command.sampling.adapter_name
                if name is not None and not self._samplers.load(name, str(command.directory)):
                    still_waiting.append(command)
                    continue
                self._jobs[command.id] = self._engine.submit(command.prompt, command.sampling)
            except UserError as error:
                events.append(Refused(command.id, str(error)))
        self._waiting_samples = still_waiting
        return events


def _take_computations(queues: Any) -> list[Compute]:
    """Remove the computations at the heads of the queues that can share passes."""
    taken: list[Compute] = []
    for queue in queues:
        while queue and isinstance(queue[0], Compute):
            if taken and queue[0].forward_only != taken[0].forward_only:
                break
            taken.append(queue.popleft())
    return taken


class LoadedSamplers:
    """The adapters that can be sampled from; the one that was used longest ago makes room for another.

    Args:
        engine: The engine.
        changes: Loads and unloads its adapters.
        most: Maximum number of adapters.
    """

    def __init__(self, engine: Engine, changes: AdapterChanges, most: int) -> None:
        self._engine = engine
        self._changes = changes
        self._most = most
        self._names: list[str] = []  # in the order of their last use

    def load(self, name: str, directory: str) -> bool:
        """Load an adapter; return False if those that are loaded are all in use.

        Raises:
            UserError: The adapter cannot be sampled from.
        """
        if name in self._names:
            self._names.remove(name)
            self._names.append(name)
            return True
        if len(self._names) >= self._most and not self._unload_oldest():
            return False
        self._changes.load(name, directory)
        self._names.append(name)
        return True

    def _unload_oldest(self) -> bool:
        for name in self._names:
            if not self._engine.uses_adapter(name):
                self._changes.close(name)
                self._changes.remove_unused()
                self._names.remove(name)
                return True
        return False
