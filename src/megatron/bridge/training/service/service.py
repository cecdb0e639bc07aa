# SPDX-License-Identifier: Apache-2.0
"""Sessions, models and samplers of the training service."""

import math
import secrets
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megatron.bridge.inference.server.errors import ApiError
from megatron.bridge.training.adapter_trainer import AdamSettings
from megatron.bridge.training.service import protobuf
from megatron.bridge.training.service.checkpoints import Checkpoints, Description, SavedWeights
from megatron.bridge.training.service.commands import (
    AddModel,
    Compute,
    ExportModel,
    LoadModel,
    RemoveModel,
    Sample,
    SaveModel,
    Step,
)
from megatron.bridge.training.service.ordering import Results, Turns
from megatron.bridge.training.service.rank_client import RankClient
from megatron.bridge.training.service.ranks import ServiceFacts
from megatron.bridge.training.service.rows import describe_samples, make_sampling, read_rows
from megatron.bridge.training.service.schemas import (
    CreateModel,
    CreateSamplingSession,
    ForwardBackward,
    LoadWeights,
    LoraConfig,
    OptimStep,
    SampleRequest,
    SaveWeights,
    SaveWeightsForSampler,
    read_body,
    settings_of,
)
from megatron.bridge.utils.errors import UserError

ALPHA = 32.0
"""Numerator of the scaling of all adapters, whatever their rank."""
_EPHEMERAL = "ephemeral-"
_KEPT_SNAPSHOTS = 8
"""Samplers without a name that a model keeps; older ones are deleted."""


@dataclass
class Session:
    """A client.

    Attributes:
        id: Its id.
        last_seen: When it sent its last request, in seconds of ``time.monotonic``.
        models: Ids of its models.
    """

    id: str
    last_seen: float = field(default_factory=time.monotonic)
    models: list[str] = field(default_factory=list)


@dataclass
class Model:
    """An adapter that is trained."""

    id: str
    session: Session
    description: Description
    turns: Turns
    snapshots: list[SavedWeights] = field(default_factory=list)


@dataclass(frozen=True)
class Sampler:
    """What a sampling session samples from; without weights, the base."""

    id: str
    session: str
    weights: SavedWeights | None = None


@dataclass(frozen=True)
class ForwardAnswer:
    """Log-probabilities of the targets of each datum, and the loss."""

    logprobs: Sequence[Sequence[float]]
    metrics: Mapping[str, float]

    def to_protobuf(self) -> bytes:
        """Encode the answer for the client."""
        return protobuf.write_forward_backward(self.logprobs, self.metrics)

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON, in which a number that is not finite is null."""
        outputs = []
        for row in self.logprobs:
            data = [_finite_or_none(value) for value in row]
            outputs.append({"logprobs": {"data": data, "dtype": "float32", "shape": [len(row)]}})
        metrics = {key: _finite_or_none(value) for key, value in self.metrics.items()}
        return {
            "loss_fn_output_type": "ArrayRecord",
            "loss_fn_outputs": outputs,
            "metrics": metrics,
        }


@dataclass(frozen=True)
class SampleAnswer:
    """Completions of a prompt."""

    values: Mapping[str, Any]

    def to_protobuf(self) -> bytes:
        """Encode the answer for the client."""
        return protobuf.write_sample(self.values)

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON."""
        return dict(self.values)


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


class Service:
    """The state of the service; its methods run in the event loop.

    Args:
        name: Name of the base.
        path: Where the base is from, which is also a name of it, and its tokenizer's.
        facts: Facts of the base.
        checkpoints: Saved weights.
        most_samples: Texts that may be sampled or wait at the same time.
        idle_seconds: Time without a request after which the models of a session are removed.
    """

    def __init__(
        self,
        name: str,
        path: str,
        facts: ServiceFacts,
        checkpoints: Checkpoints,
        most_samples: int,
        idle_seconds: float,
    ) -> None:
        self.name = name
        self.path = path
        self.facts = facts
        self.is_ready = False
        self.results = Results()
        self.ranks: RankClient | None = None
        self._checkpoints = checkpoints
        self._most_samples = most_samples
        self._idle_seconds = idle_seconds
        self._open_samples = 0
        self._sessions: dict[str, Session] = {}
        self._models: dict[str, Model] = {}
        self._samplers: dict[str, Sampler] = {}

    @property
    def _ranks(self) -> RankClient:
        if self.ranks is None:
            raise ApiError(503, "the model is not ready yet: try again later", code="not_ready")
        return self.ranks

    # ---- sessions -----------------------------------------------------------------------------------------------

    def create_session(self) -> dict[str, Any]:
        """Add a client."""
        session = Session(uuid.uuid4().hex)
        self._sessions[session.id] = session
        answer = {"type": "create_session", "session_id": session.id}
        return {**answer, "warning_message": self.left_out()}

    def left_out(self) -> str | None:
        """Return which of the layers that clients ask for by default have no adapter here; None for none."""
        layers: list[str] = []
        if not self.facts.layers.output:
            layers.append("the output layer (train_unembed), whose weight is the embedding's")
        if self.facts.has_experts:
            layers.append("experts (a part of train_mlp)")
        if not layers:
            return None
        adapted = (*self.facts.layers.attention, *self.facts.layers.mlp, *self.facts.layers.output)
        return f"no adapters here: {' and '.join(layers)}; adapters change {', '.join(adapted)}"

    def touch(self, session_id: str) -> Session:
        """Return a session and note that its client is there.

        Raises:
            ApiError: There is no such session.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise ApiError(
                410, f"session_id={session_id!r:.80} has ended: create a session", "session_id"
            )
        session.last_seen = time.monotonic()
        return session

    async def finish_session(self, session_id: str) -> None:
        """Remove a session with its models."""
        session = self.touch(session_id)
        for model_id in list(session.models):
            await self._remove(self._models[model_id])
        for sampler in list(self._samplers.values()):
            if sampler.session == session_id:
                del self._samplers[sampler.id]
        self._sessions.pop(session_id, None)

    async def remove_idle_sessions(self) -> None:
        """Remove the sessions whose clients have not sent anything for long."""
        oldest = time.monotonic() - self._idle_seconds
        for session in list(self._sessions.values()):
            if session.last_seen < oldest:
                _log(f"session {session.id} was idle for {self._idle_seconds:.0f} s and is removed")
                await self.finish_session(session.id)

    # ---- models -------------------------------------------------------------------------------------------------

    def create_model(self, body: CreateModel) -> str:
        """Start to add a model; return the id of the request."""
        self._check_base(body.base_model)
        if body.lora_config is None:
            raise ApiError(
                400,
                "lora_config is missing: this server trains adapters over a frozen base, so give their rank",
                "lora_config",
            )
        config = body.lora_config
        targets = self._choose_layers(config)
        description = Description(
            self.name,
            config.rank,
            ALPHA,
            train_attn=config.train_attn,
            train_mlp=config.train_mlp,
            train_unembed=config.train_unembed and bool(self.facts.layers.output),
            user_metadata=body.user_metadata,
        )
        seed = secrets.randbits(31) if config.seed is None else config.seed
        session = self.touch(body.session_id)
        model_id = f"{session.id}:train:{body.model_seq_id}"
        request_id = f"{model_id}:create"
        if request_id in self.results:
            return request_id
        model = self._add(model_id, session, description)

        async def add() -> dict[str, Any]:
            try:
                command = (AddModel, model_id, config.rank, ALPHA, seed, targets)
                await self._ranks.call(*command)
            except UserError:
                self._forget(model)
                raise
            _log(f"model {model_id}: rank {config.rank}, {', '.join(targets)}")
            return {"type": "create_model", "model_id": model_id}

        self.results.start(request_id, add)
        return request_id

    def _choose_layers(self, config: LoraConfig) -> list[str]:
        targets: list[str] = []
        if config.train_attn:
            targets += self.facts.layers.attention
        if config.train_mlp:
            targets += self.facts.layers.mlp
        if config.train_unembed:
            targets += self.facts.layers.output
        if not targets:
            raise ApiError(
                400,
                f"lora_config train_attn={config.train_attn}, train_mlp={config.train_mlp}, train_unembed="
                f"{config.train_unembed}: no layer is left ({self.left_out()}), so set train_attn=true",
                "lora_config",
            )
        return targets

    def _check_base(self, base_model: str | None) -> None:
        if base_model is not None and base_model not in (self.name, self.path):
            raise ApiError(
                400, f"base_model={base_model!r:.200}: this server has {self.name}", "base_model"
            )

    def _add(self, model_id: str, session: Session, description: Description) -> Model:
        if model_id in self._models:
            raise ApiError(400, f"model {model_id} exists: count model_seq_id on", "model_seq_id")
        model = Model(model_id, session, description, Turns())
        self._models[model_id] = model
        session.models.append(model_id)
        return model

    def _forget(self, model: Model) -> None:
        if self._models.get(model.id) is model:
            del self._models[model.id]
            model.session.models.remove(model.id)
        model.turns.close()

    async def _remove(self, model: Model) -> None:
        self._forget(model)
        await self._ranks.call(RemoveModel, model.id)
        for weights in model.snapshots:
            self._checkpoints.remove(weights)

    def find_model(self, model_id: str) -> Model:
        """Return a model and note that its client is there.

        Raises:
            ApiError: There is no such model.
        """
        model = self._models.get(model_id)
        if model is None:
            raise ApiError(
                404,
                f"model_id={model_id!r:.120} does not exist: create a model, or load saved weights",
                "model_id",
            )
        model.session.last_seen = time.monotonic()
        return model

    def describe_model(self, model_id: str) -> dict[str, Any]:
        """Return the facts of a model."""
        model = self.find_model(model_id)
        return {
            "type": "get_info",
            "model_data": {"model_name": self.name, "tokenizer_id": self.path},
            "model_id": model_id,
            "model_name": self.name,
            "is_lora": True,
            "lora_rank": model.description.lora_rank,
        }

    def unload_model(self, model_id: str) -> str:
        """Start to remove a model; return the id of the request."""
        model = self.find_model(model_id)
        request_id = f"{model_id}:unload"

        async def unload() -> dict[str, Any]:
            await self._remove(model)
            return {"type": "unload_model", "model_id": model_id}

        self.results.start(request_id, unload)
        return request_id

    # ---- requests of a model, in order --------------------------------------------------------------------------

    def run_on_model(self, kind: str, values: Mapping[str, Any]) -> str:
        """Queue a request of a model; return its id.

        A request that is wrong takes its turn and fails then, so that those behind it do not wait for it forever.

        Args:
            kind: Name of the endpoint.
            values: Body of the request.
        """
        model_id = values.get("model_id")
        number = values.get("seq_id")
        if not isinstance(model_id, str):
            raise ApiError(400, f"model_id={model_id!r:.80}: give the id of a model", "model_id")
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ApiError(
                400, f"seq_id={number!r:.80}: count requests of a model from 1", "seq_id"
            )
        model = self.find_model(model_id)
        suffix = uuid.uuid4().hex if number is None else str(number)
        request_id = f"{model_id}:{suffix}"
        if request_id in self.results:  # sent again by a client that did not get the answer
            return request_id
        body = {name: value for name, value in values.items() if name not in ("model_id", "seq_id")}
        operations = {
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load_weights,
            "save_weights_external": self._refuse_external,
        }
        operation = partial(operations[kind], model, body)
        self.results.keep(request_id, model.turns.submit(number, operation))
        return request_id

    async def _forward_backward(self, model: Model, values: Mapping[str, Any]) -> ForwardAnswer:
        body = read_body(ForwardBackward, values)
        rows = read_rows(model.id, body.forward_backward_input)
        results = await self._ranks.call(Compute, model.id, rows, body.forward_only)
        loss = sum(result.loss for result in results)
        return ForwardAnswer([result.logprobs for result in results], {"loss:sum": loss})

    async def _optim_step(self, model: Model, values: Mapping[str, Any]) -> dict[str, Any]:
        if "optimizer_params" in values:
            raise UserError("optimizer_params: this server has AdamW only, so send adam_params")
        settings = AdamSettings(**settings_of(read_body(OptimStep, values)))
        norm = await self._ranks.call(Step, model.id, settings)
        return {"metrics": {"grad_norm": norm}}

    async def _save_weights(self, model: Model, values: Mapping[str, Any]) -> dict[str, Any]:
        body = read_body(SaveWeights, values)
        _note_time_to_live(body.ttl_seconds)
        weights = self._checkpoints.locate(model.id, "weights", body.path or _time_as_name())
        arriving = self._checkpoints.begin(weights, body.overwrite)
        await self._ranks.call(SaveModel, model.id, str(arriving))
        self._checkpoints.publish(weights, arriving, _with_metadata(model, body.user_metadata))
        return {"type": "save_weights", "path": weights.path}

    async def _save_for_sampler(self, model: Model, values: Mapping[str, Any]) -> dict[str, Any]:
        body = read_body(SaveWeightsForSampler, values)
        _note_time_to_live(body.ttl_seconds)
        if body.kind != "snapshot":
            raise UserError(
                f"kind={body.kind!r}: samplers keep their weights here, so use snapshot"
            )
        number = body.sampling_session_seq_id
        name = body.path or (_time_as_name() if number is None else f"{_EPHEMERAL}{number}")
        weights = self._checkpoints.locate(model.id, "sampler_weights", name)
        arriving = self._checkpoints.begin(weights, overwrite=False)
        await self._ranks.call(ExportModel, model.id, str(arriving))
        self._checkpoints.publish(weights, arriving, _with_metadata(model, body.user_metadata))
        answer = {"type": "save_weights_for_sampler"}
        if number is None:
            return {**answer, "path": weights.path}
        sampler = self._add_sampler(model.session.id, number, weights)
        model.snapshots.append(weights)
        for old in model.snapshots[:-_KEPT_SNAPSHOTS]:
            self._checkpoints.remove(old)
            model.snapshots.remove(old)
        return {**answer, "sampling_session_id": sampler.id}

    async def _refuse_external(self, model: Model, values: Mapping[str, Any]) -> None:
        raise UserError(
            f"save_weights_external is not supported for {model.id}, {values.get('path')!r:.80}: the folder of "
            "save_weights_for_sampler is already in the format of peft"
        )

    async def _load_weights(self, model: Model, values: Mapping[str, Any]) -> dict[str, Any]:
        return await self._load(model, read_body(LoadWeights, values))

    async def _load(self, model: Model, body: LoadWeights) -> dict[str, Any]:
        self._check_base(body.base_model)
        weights, description = self._checkpoints.find(body.path, "weights")
        await self._ranks.call(LoadModel, model.id, str(weights.folder), body.optimizer)
        model.description = description
        return {"type": "load_weights", "path": body.path, "model_id": model.id}

    def load_as_new_model(self, body: LoadWeights) -> str:
        """Start to add a model from saved weights; return the id of the request."""
        if body.session_id is None or body.model_seq_id is None:
            raise ApiError(400, "model_id is missing: give it, or session_id and model_seq_id")
        session = self.touch(body.session_id)
        model_id = f"{session.id}:train:{body.model_seq_id}"
        request_id = f"{model_id}:load"
        if request_id in self.results:
            return request_id
        _, description = self._checkpoints.find(body.path, "weights")
        model = self._add(model_id, session, description)

        async def load() -> dict[str, Any]:
            try:
                return await self._load(model, body)
            except (UserError, ApiError):
                self._forget(model)
                raise

        self.results.start(request_id, load)
        return request_id

    def describe_weights(self, path: str) -> dict[str, Any]:
        """Return the facts of saved weights."""
        _, description = self._checkpoints.find(path)
        return {
            "base_model": description.base_model,
            "is_lora": True,
            "lora_rank": description.lora_rank,
            "train_unembed": description.train_unembed,
            "train_mlp": description.train_mlp,
            "train_attn": description.train_attn,
        }

    # ---- sampling -----------------------------------------------------------------------------------------------

    def create_sampler(self, body: CreateSamplingSession) -> dict[str, Any]:
        """Add a sampler of saved weights, or of the base."""
        session = self.touch(body.session_id)
        self._check_base(body.base_model)
        weights = None
        if body.model_path is not None:
            weights, _ = self._checkpoints.find(body.model_path, "sampler_weights")
        sampler = self._add_sampler(session.id, body.sampling_session_seq_id, weights)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    def _add_sampler(self, session: str, number: int, weights: SavedWeights | None) -> Sampler:
        sampler = Sampler(f"{session}:sample:{number}", session, weights)
        self._samplers[sampler.id] = sampler
        return sampler

    def find_sampler(self, sampler_id: str) -> Sampler:
        """Return a sampler.

        Raises:
            ApiError: There is no such sampler.
        """
        sampler = self._samplers.get(sampler_id)
        if sampler is None:
            raise ApiError(
                404, f"sampler {sampler_id!r:.120} does not exist: create a sampling session"
            )
        self.touch(sampler.session)
        return sampler

    def describe_sampler(self, sampler_id: str) -> dict[str, Any]:
        """Return the facts of a sampler."""
        weights = self.find_sampler(sampler_id).weights
        path = None if weights is None else weights.path
        return {"sampler_id": sampler_id, "base_model": self.name, "model_path": path}

    def sample(self, body: SampleRequest) -> tuple[str, list[str]]:
        """Start to sample; return the id of the request, and those of the samples."""
        weights = self._weights_to_sample(body)
        request_id = f"{body.sampling_session_id}:{body.seq_id}"
        if body.sampling_session_id is None or body.seq_id is None:
            request_id = f"sample:{uuid.uuid4().hex}"
        sequence_ids = [f"{request_id}:{index}" for index in range(body.num_samples)]
        if request_id in self.results:
            return request_id, sequence_ids
        count = self._open_samples + body.num_samples
        if self._open_samples and count > self._most_samples:
            raise ApiError(
                429, f"{self._open_samples} samples are running or waiting: try again later"
            )
        self._open_samples += body.num_samples

        async def compute() -> SampleAnswer:
            try:
                return await self._sample(body, weights)
            finally:
                self._open_samples -= body.num_samples

        self.results.start(request_id, compute)
        return request_id, sequence_ids

    def _weights_to_sample(self, body: SampleRequest) -> SavedWeights | None:
        if body.sampling_session_id is not None:
            return self.find_sampler(body.sampling_session_id).weights
        self._check_base(body.base_model)
        if body.model_path is not None:
            return self._checkpoints.find(body.model_path, "sampler_weights")[0]
        if body.base_model is None:
            raise ApiError(400, "sampling_session_id is missing: give it, base_model or model_path")
        return None

    async def _sample(self, body: SampleRequest, weights: SavedWeights | None) -> SampleAnswer:
        prompt = body.prompt.read_tokens()
        if weights is not None and not weights.folder.is_dir():
            raise UserError(
                f"{weights.path} was deleted: a model keeps its last {_KEPT_SNAPSHOTS} samplers without a name, so "
                "save those of longer use with a name"
            )
        name = None if weights is None else weights.path
        folder = None if weights is None else str(weights.folder)
        sampling = make_sampling(body, prompt, name, self.facts.max_context)
        completions = await self._ranks.call(Sample, prompt, sampling, folder)
        return SampleAnswer(describe_samples(body, completions))

    async def close(self) -> None:
        """Delete the samplers without a name."""
        for model in self._models.values():
            for weights in model.snapshots:
                self._checkpoints.remove(weights)


def _with_metadata(model: Model, metadata: Mapping[str, Any] | None) -> Description:
    return replace(model.description, user_metadata=metadata)


def _time_as_name() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def _note_time_to_live(seconds: int | None) -> None:
    if seconds is not None:
        _log(f"ttl_seconds={seconds}: weights stay until somebody deletes their folder")


def _log(message: str) -> None:
    sys.stderr.write(f"{message}\n")
