# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""The endpoints of the server."""

import asyncio
import sys
import traceback
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Mapping,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException

from megatron.bridge.inference.conversations.planning import template_options
from megatron.bridge.inference.prompts import PromptReader
from megatron.bridge.inference.server import schemas
from megatron.bridge.inference.server.engine_client import EngineClient, EngineGoneError
from megatron.bridge.inference.server.errors import (
    ApiError,
    SlowReaderError,
    refusal_of,
    to_json,
)
from megatron.bridge.inference.server.generation import Generation
from megatron.bridge.inference.server.metrics import CONTENT_TYPE, Metrics
from megatron.bridge.inference.server.page import add_page
from megatron.bridge.inference.server.planner import (
    RequestPlan,
    RequestPlanner,
    check_model_name,
)
from megatron.bridge.inference.server.responses import ResponsesRequest, ResponseWriter
from megatron.bridge.inference.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from megatron.bridge.utils.errors import UserError
from megatron.bridge.version import __version__ as VERSION


@dataclass
class Server:
    """State that the endpoints share."""

    planner: RequestPlanner  # plans requests to the model
    seconds: float  # time limit of a request
    created: int  # start time of the server in seconds since 1970
    client: EngineClient | None = None
    metrics: Metrics | None = None
    is_ready: bool = False
    _tokenizing: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    @property
    def name(self) -> str:
        return self.planner.name

    async def tokenize(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call what uses the tokenizer in a thread, one call at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function, *args)

    def generation(self, plan: RequestPlan, include_usage: bool) -> Generation:
        """Return the generation that answers a request."""
        assert self.client is not None
        assert self.metrics is not None
        return Generation(self.client, self.metrics, plan, self.seconds, include_usage)


class AsciiJSONResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def make_app(server: Server) -> FastAPI:
    """Create the application; ``server.client`` is set when the event loop runs."""
    app = new_app(_FIELDS)
    _add_facts(app, server)
    _add_tokenizer(app, server)
    _add_generation(app, server)
    return app


def new_app(fields: Mapping[str, Collection[str]]) -> FastAPI:
    """Create an application without endpoints, whose answers and errors are those of OpenAI's API.

    Args:
        fields: Names of the fields of each endpoint's body, for suggestions.
    """
    app = FastAPI(
        title="Megatron Bridge",
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        default_response_class=AsciiJSONResponse,
    )
    _add_error_handlers(app, fields)
    return app


def _error_response(error: ApiError) -> Response:
    return AsciiJSONResponse(error.body, error.status, error.headers)


def as_api_error(error: Exception) -> ApiError:
    """Convert an exception to an error response."""
    if isinstance(error, ApiError | UserError):
        return refusal_of(error)
    if isinstance(error, SlowReaderError):
        return ApiError(499, str(error))
    if isinstance(error, EngineGoneError):
        return ApiError(
            503, f"the engine has ended: {str(error).splitlines()[-1]}", code="engine_ended"
        )
    sys.stderr.write("".join(traceback.format_exception(error)))
    return ApiError(500, "internal error: see the server's log")


def _add_error_handlers(app: FastAPI, fields: Mapping[str, Collection[str]]) -> None:
    async def known(_: Request, error: Exception) -> Response:
        return _error_response(as_api_error(error))

    for kind in (ApiError, UserError, EngineGoneError, Exception):
        app.add_exception_handler(kind, known)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        names = fields.get(request.url.path, ())
        return _error_response(schemas.refusal_of_fields(error.errors(), names))

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        message = (
            f"{request.method} {request.url.path}: {error.detail}"
            if error.status_code != 400
            else error.detail
        )
        return _error_response(
            ApiError(error.status_code, message, headers=dict(error.headers or {}))
        )


_FIELDS = {
    "/v1/completions": CompletionRequest.model_fields,
    "/v1/chat/completions": ChatRequest.model_fields,
    "/v1/responses": ResponsesRequest.model_fields,
    "/tokenize": TokenizeRequest.model_fields,
    "/detokenize": DetokenizeRequest.model_fields,
}


def _add_facts(app: FastAPI, server: Server) -> None:
    model_card = {
        "created": server.created,
        "owned_by": "megatron-bridge",
        "max_model_len": server.planner.max_context,
    }
    model_card["input_modalities"] = server.planner.reader.modalities

    def describe_models() -> dict[str, Any]:
        names = (server.name, *server.planner.adapters)
        return {name: _describe_model(name, server.name, model_card) for name in names}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics.text() if server.metrics else b"", media_type=CONTENT_TYPE)

    add_page(app)
    add_state_endpoints(app, describe_models, lambda: server.is_ready)


def _describe_model(name: str, base_name: str, model_card: Mapping[str, Any]) -> dict[str, Any]:
    description = {"id": name, "object": "model", **model_card}
    if name != base_name:
        description["parent"] = base_name
    return description


def add_state_endpoints(
    app: FastAPI, describe_models: Callable[[], Mapping[str, Any]], is_ready: Callable[[], bool]
) -> None:
    """Add the endpoints that every server has.

    Args:
        app: The application.
        describe_models: Returns the description of each served model by its name.
        is_ready: Returns whether requests can be computed.
    """

    @app.get("/health")
    async def health() -> dict[str, str]:
        if not is_ready():
            raise ApiError(503, "the model is not ready yet: try again later", code="not_ready")
        return {"status": "ready"}

    @app.get("/ping")
    @app.post("/ping")
    async def ping() -> dict[str, str]:
        return await health()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": list(describe_models().values())}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        served = describe_models()
        check_model_name(name, list(served))
        return served[name]


def _add_tokenizer(app: FastAPI, server: Server) -> None:
    reader = server.planner.reader
    hf = reader.hf

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        server.planner.adapter_of(body.model)
        tokens = await server.tokenize(_tokenize_body, reader, body)
        names = hf.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": server.planner.max_context,
            "tokens": tokens,
            "token_strs": names,
        }

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        server.planner.adapter_of(body.model)
        wrong = [token for token in body.tokens if not 0 <= token < len(hf)]
        if wrong:
            raise ApiError(
                400, f"tokens: {wrong[0]} is not in the vocabulary of {len(hf)}", "tokens"
            )
        return {"prompt": await server.tokenize(hf.decode, body.tokens)}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        names = (
            "bos_token",
            "eos_token",
            "pad_token",
            "unk_token",
            "padding_side",
            "model_max_length",
        )
        special_tokens = {name: getattr(hf, name, None) for name in names}
        template = reader.template or hf.chat_template
        return {"tokenizer_class": type(hf).__name__, "chat_template": template, **special_tokens}


def _tokenize_body(reader: PromptReader, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        record = {
            "messages": [message.as_record() for message in body.messages],
            "tools": [tool.as_record() for tool in body.tools or ()],
            "chat_template_kwargs": template_options(
                reader, reader.template_source(), body.chat_template_kwargs, None
            ),
        }
        continues = bool(body.continue_final_message)
        return reader.tokens(record, "messages", continues)
    return reader.hf.encode(body.prompt, add_special_tokens=body.add_special_tokens)


def _add_generation(app: FastAPI, server: Server) -> None:
    planner = server.planner

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        plan = await server.tokenize(planner.plan_completion, body)
        generation = server.generation(plan, body.include_usage)
        return await _answer_request(generation, request, bool(body.stream))

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        plan = await server.tokenize(planner.plan_chat, body)
        generation = server.generation(plan, body.include_usage)
        return await _answer_request(generation, request, bool(body.stream))

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        plan = await server.tokenize(planner.plan_response, body)
        generation = server.generation(plan, include_usage=True)
        writer = ResponseWriter(body, plan.model)
        if body.stream:
            await generation.start()
            return _EventResponse(generation, _response_events(generation, writer))
        answer = await _unless_gone(generation, request)
        return AsciiJSONResponse(writer.write_whole(answer))


async def _answer_request(generation: Generation, request: Request, stream: bool) -> Response:
    if stream:
        await generation.start()
        return _EventResponse(generation, _event_stream(generation))
    return AsciiJSONResponse(await _unless_gone(generation, request))


_NO_BUFFERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class _EventResponse(StreamingResponse):
    """A stream of server-sent events; when its sending ends, by whatever cause, the engine is told so."""

    def __init__(self, generation: Generation, events: AsyncGenerator[bytes]) -> None:
        self._generation = generation
        self._events = events
        super().__init__(self._events, media_type="text/event-stream", headers=_NO_BUFFERS)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()
            await self._events.aclose()


async def _event_stream(generation: Generation) -> AsyncGenerator[bytes]:
    """Yield server-sent events; an error is the last event, without [DONE]."""
    try:
        async with aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                yield b"data: " + to_json(piece) + b"\n\n"
        yield b"data: [DONE]\n\n"
    except Exception as error:  # the status line has already been sent
        yield b"data: " + to_json(as_api_error(error).body) + b"\n\n"
    finally:
        generation.close()


async def _response_events(generation: Generation, writer: ResponseWriter) -> AsyncGenerator[bytes]:
    """Yield the events of ``/v1/responses``, whose last one says how the response has ended."""
    reason = None
    usage = {}
    try:
        for event in writer.begin():
            yield _named_event(event)
        async with aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                usage = piece.get("usage", usage)
                for choice in piece["choices"]:
                    reason = choice["finish_reason"] or reason
                    for event in writer.add(choice["delta"]):
                        yield _named_event(event)
        for event in writer.finish(reason, usage):
            yield _named_event(event)
    except Exception as error:  # the status line has already been sent
        failure = as_api_error(error).body["error"]
        yield _named_event({"type": "error", **{key: failure[key] for key in _ERROR_FIELDS}})
    finally:
        generation.close()


_ERROR_FIELDS = ("code", "message", "param")


def _named_event(event: dict[str, Any]) -> bytes:
    return b"event: " + event["type"].encode() + b"\ndata: " + to_json(event) + b"\n\n"


async def _unless_gone(generation: Generation, request: Request) -> dict[str, Any]:
    """Return the complete response; cancel it when the client disconnects."""

    async def compute() -> dict[str, Any]:
        await generation.start()
        return await generation.whole()

    work = asyncio.create_task(compute())
    gone = asyncio.create_task(_wait_for_disconnect(request.receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ApiError(499, "the client has disconnected")
        return work.result()
    finally:
        work.cancel()
        gone.cancel()
        generation.close()


async def _wait_for_disconnect(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
