# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""The endpoints of the training service, those of Tinker's client."""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from megatron.bridge.inference.server.app import (
    AsciiJSONResponse,
    add_state_endpoints,
    as_api_error,
    new_app,
)
from megatron.bridge.inference.server.errors import ApiError
from megatron.bridge.training.service import protobuf
from megatron.bridge.training.service.schemas import (
    CreateModel,
    CreateSamplingSession,
    CreateSession,
    LoadWeights,
    OfModel,
    OfPath,
    OfRequest,
    OfSession,
    SampleRequest,
    read_body,
)
from megatron.bridge.training.service.service import ForwardAnswer, SampleAnswer, Service
from megatron.bridge.utils.errors import UserError

PREFIX = "/api/v1"
WAIT_SECONDS = 20.0
"""How long ``retrieve_future`` waits for a result; the client waits 45 seconds."""

CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "fwdbwd_max_chunk_bytes_count": 5_000_000,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "custom_loss_server_side": False,
}
"""How the client talks to this server."""

_KINDS_IN_ORDER = (
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
)
"""Requests of a model whose bodies are JSON."""

Values = dict[str, Any]


def make_service_app(service: Service) -> FastAPI:
    """Create the application; ``service.ranks`` is set when the event loop runs."""
    app = new_app({})
    card = {"created": 0, "owned_by": "megatron-bridge", "max_model_len": service.facts.max_context}
    models = {service.name: {"id": service.name, "object": "model", **card}}
    add_state_endpoints(app, lambda: models, lambda: service.is_ready)
    _add_facts(app, service)
    _add_sessions(app, service)
    _add_models(app, service)
    _add_training(app, service)
    _add_sampling(app, service)
    _add_results(app, service)
    return app


def _add_facts(app: FastAPI, service: Service) -> None:
    @app.get(f"{PREFIX}/healthz")
    async def healthz() -> Values:
        if not service.is_ready:
            raise ApiError(503, "the model is not ready yet: try again later", code="not_ready")
        return {"status": "ok"}

    @app.get(f"{PREFIX}/get_server_capabilities")
    async def capabilities() -> Values:
        model = {
            "model_name": service.name,
            "max_context_length": service.facts.max_context,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    @app.post(f"{PREFIX}/client/config")
    async def client_config() -> Values:
        return CLIENT_CONFIG

    @app.post(f"{PREFIX}/client/dynamic_config")
    async def dynamic_config() -> Values:
        return {"sample_cancel_enabled": True}

    @app.post(f"{PREFIX}/telemetry")
    async def telemetry() -> Values:
        return {"status": "accepted"}  # and dropped


def _add_sessions(app: FastAPI, service: Service) -> None:
    @app.post(f"{PREFIX}/create_session")
    async def create_session(request: Request) -> Values:
        read_body(CreateSession, await _read_json(request))
        return service.create_session()

    @app.post(f"{PREFIX}/session_heartbeat")
    async def session_heartbeat(request: Request) -> Values:
        service.touch(read_body(OfSession, await _read_json(request)).session_id)
        return {"type": "session_heartbeat"}

    @app.post(f"{PREFIX}/sessions/{{session_id}}/finish")
    async def finish_session(session_id: str) -> Response:
        await service.finish_session(session_id)
        return Response(status_code=204)


def _add_models(app: FastAPI, service: Service) -> None:
    @app.post(f"{PREFIX}/create_model")
    async def create_model(request: Request) -> Values:
        body = read_body(CreateModel, await _read_json(request))
        return {"request_id": service.create_model(body)}

    @app.post(f"{PREFIX}/get_info")
    async def get_info(request: Request) -> Values:
        return service.describe_model(read_body(OfModel, await _read_json(request)).model_id)

    @app.post(f"{PREFIX}/unload_model")
    async def unload_model(request: Request) -> Values:
        body = read_body(OfModel, await _read_json(request))
        return {"request_id": service.unload_model(body.model_id), "model_id": body.model_id}

    @app.post(f"{PREFIX}/weights_info")
    async def weights_info(request: Request) -> Values:
        return service.describe_weights(read_body(OfPath, await _read_json(request)).tinker_path)

    @app.post(f"{PREFIX}/load_weights")
    async def load_weights(request: Request) -> Values:
        values = await _read_json(request)
        if values.get("model_id") is not None:
            return _queue(service, "load_weights", values)
        return {"request_id": service.load_as_new_model(read_body(LoadWeights, values))}


def _add_training(app: FastAPI, service: Service) -> None:
    @app.post(f"{PREFIX}/forward_backward")
    async def forward_backward(request: Request) -> Values:
        if request.headers.get("content-type", "").startswith(protobuf.MEDIA_TYPE):
            values = protobuf.read_forward_backward(await request.body())
        else:
            values = await _read_json(request)
        return _queue(service, "forward_backward", values)

    @app.post(f"{PREFIX}/forward")
    async def forward(request: Request) -> Values:
        values = await _read_json(request)
        data = values.pop("forward_input", None)
        values = {**values, "forward_backward_input": data, "forward_only": True}
        return _queue(service, "forward_backward", values)

    for kind in _KINDS_IN_ORDER:
        app.post(f"{PREFIX}/{kind}")(_make_endpoint(service, kind))


def _make_endpoint(service: Service, kind: str) -> Callable[..., Any]:
    async def endpoint(request: Request) -> Values:
        return _queue(service, kind, await _read_json(request))

    return endpoint


def _queue(service: Service, kind: str, values: Mapping[str, Any]) -> Values:
    request_id = service.run_on_model(kind, values)
    return {"request_id": request_id, "model_id": values["model_id"]}


def _add_sampling(app: FastAPI, service: Service) -> None:
    @app.post(f"{PREFIX}/create_sampling_session")
    async def create_sampling_session(request: Request) -> Values:
        return service.create_sampler(read_body(CreateSamplingSession, await _read_json(request)))

    @app.get(f"{PREFIX}/samplers/{{sampler_id}}")
    async def samplers(sampler_id: str) -> Values:
        return service.describe_sampler(sampler_id)

    @app.post(f"{PREFIX}/asample")
    async def asample(request: Request) -> Values:
        request_id, sequence_ids = service.sample(
            read_body(SampleRequest, await _read_json(request))
        )
        return {"request_id": request_id, "sample_sequence_ids": sequence_ids}


def _add_results(app: FastAPI, service: Service) -> None:
    @app.post(f"{PREFIX}/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        body = read_body(OfRequest, await _read_json(request))
        try:
            result = await service.results.wait(body.request_id, WAIT_SECONDS)
        except KeyError as error:
            raise ApiError(
                404, f"request_id={body.request_id!r:.120} is not known", "request_id"
            ) from error
        if result is None:
            pending = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return AsciiJSONResponse(pending, 408)
        wants_protobuf = protobuf.MEDIA_TYPE in request.headers.get("accept", "")
        return _answer(result, wants_protobuf)

    @app.post(f"{PREFIX}/cancel_future")
    async def cancel_future(request: Request) -> Response:
        service.results.cancel(read_body(OfRequest, await _read_json(request)).request_id)
        return Response(status_code=204)


def _answer(result: asyncio.Future[Any], wants_protobuf: bool) -> Response:
    """Return the answer to a request that has ended."""
    if result.cancelled():
        failure = {"error": "the request was cancelled", "category": "user"}
        return AsciiJSONResponse(failure)
    error = result.exception()
    if error is not None:
        is_of_user = isinstance(error, UserError | ApiError)
        message = str(error) if is_of_user else as_api_error(_as_exception(error)).message
        category = "user" if is_of_user else "server"
        return AsciiJSONResponse({"error": message, "category": category})
    value = result.result()
    if not isinstance(value, ForwardAnswer | SampleAnswer):
        return AsciiJSONResponse(value)
    if wants_protobuf:
        return Response(value.to_protobuf(), media_type=protobuf.MEDIA_TYPE)
    return AsciiJSONResponse(value.to_json())


def _as_exception(error: BaseException) -> Exception:
    assert isinstance(error, Exception), "results have no others"
    return error


async def _read_json(request: Request) -> Values:
    try:
        values = json.loads(await request.body() or b"{}")
    except ValueError as error:
        raise ApiError(400, "the body is not JSON: send an object") from error
    if not isinstance(values, dict):
        raise ApiError(400, "the body is not a JSON object: send one")
    return values
