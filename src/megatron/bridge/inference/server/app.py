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
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from megatron.bridge.inference.prompts import PromptReader
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.inference.server import schemas
from megatron.bridge.inference.server.answers import (
    ChatFormat,
    CompletionFormat,
    Format,
    TokenTexts,
)
from megatron.bridge.inference.server.chat import plan_chat, template_options
from megatron.bridge.inference.server.engine_client import EngineClient, EngineGoneError
from megatron.bridge.inference.server.errors import ApiError, SlowReaderError, to_json
from megatron.bridge.inference.server.generation import Generation
from megatron.bridge.inference.server.metrics import CONTENT_TYPE, Metrics
from megatron.bridge.inference.server.page import add_page
from megatron.bridge.inference.server.responses import ResponsesRequest, ResponseWriter
from megatron.bridge.inference.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from megatron.bridge.utils.errors import UserError, did_you_mean
from megatron.bridge.version import __version__ as VERSION

_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions


@dataclass
class Server:
    """State that the endpoints share."""

    name: str  # name of the model
    reader: PromptReader  # converts prompts to tokens
    max_context: int  # tokens of a prompt and its completion
    seconds: float  # time limit of a request
    created: int  # start time of the server in seconds since 1970
    adapters: tuple[str, ...] = ()  # names of adapters, which clients use as names of models
    tool_parser: str | None = None  # name of the format of calls; None takes the chat template's
    client: EngineClient | None = None
    metrics: Metrics | None = None
    is_ready: bool = False
    texts: TokenTexts = field(init=False)
    _tokenizing: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def __post_init__(self) -> None:
        self.texts = TokenTexts(self.reader.hf)

    def adapter_of(self, name: str | None) -> str | None:
        """Return the adapter for a model name, and refuse unknown names."""
        if name is not None:
            check_model_name(name, (self.name, *self.adapters))
        return None if name == self.name else name

    async def tokenize(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call the tokenizer in a thread, one call at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function, *args)

    def check_length(self, tokens: int, limit: int | None = None, name: str = "max_tokens") -> int:
        """Return the number of tokens that may follow a prompt.

        Args:
            tokens: Tokens of the prompt.
            limit: Tokens that the client asks for at most; None asks for as many as fit.
            name: The field with the limit.

        Raises:
            ApiError: The prompt alone or with the answer exceeds the context.
        """
        free_tokens = self.max_context - tokens
        if free_tokens < 1:
            message = f"the prompt has {tokens} tokens, more than the context of {self.max_context} allows: shorten it"
            raise ApiError(400, message, "prompt", "context_length_exceeded")
        if limit is not None and limit > free_tokens:
            message = (
                f"a prompt of {tokens} tokens and {name}={limit} exceed the context of {self.max_context}: shorten the "
                f"prompt, or lower {name}"
            )
            raise ApiError(400, message, name, "context_length_exceeded")
        return free_tokens if limit is None else limit

    def generation(
        self,
        format: Format,
        prompts: list[list[int]],
        sampling: Sampling,
        usage: bool,
        echoed: Any = None,
    ) -> Generation:
        assert self.client is not None
        assert self.metrics is not None
        name = sampling.adapter_name or self.name
        return Generation(
            self.client, self.metrics, name, format, prompts, sampling, self.seconds, echoed, usage
        )


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
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(400, str(error))
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
        names = list(fields.get(request.url.path, ()))
        deepest = max(
            error.errors(), key=lambda item: len(item["loc"])
        )  # the most specific error of a union's variants
        message, param = schemas.describe(deepest, names)
        return _error_response(ApiError(400, message, param))

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
        "max_model_len": server.max_context,
    }
    model_card["input_modalities"] = ["text", "image"] if server.reader.media else ["text"]
    served = {
        name: {
            "id": name,
            "object": "model",
            **model_card,
            **({"parent": server.name} if name != server.name else {}),
        }
        for name in (server.name, *server.adapters)
    }

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics.text() if server.metrics else b"", media_type=CONTENT_TYPE)

    add_page(app)
    add_state_endpoints(app, served, lambda: server.is_ready)


def add_state_endpoints(
    app: FastAPI, served: Mapping[str, Any], is_ready: Callable[[], bool]
) -> None:
    """Add the endpoints that every server has.

    Args:
        app: The application.
        served: The description of each model by its name.
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
        return {"object": "list", "data": list(served.values())}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        check_model_name(name, served)
        return served[name]


def check_model_name(name: str, served: Collection[str]) -> None:
    """Refuse the name of a model that is not served."""
    if name not in served:
        message = f"model {name!r:.100} is not served here{did_you_mean(name, served)}: use {' or '.join(served)}"
        raise ApiError(404, message, "model", "model_not_found")


def _add_tokenizer(app: FastAPI, server: Server) -> None:
    hf = server.reader.hf

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        server.adapter_of(body.model)
        tokens = await server.tokenize(_tokenize_body, server, body)
        names = hf.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": server.max_context,
            "tokens": tokens,
            "token_strs": names,
        }

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        server.adapter_of(body.model)
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
        template = server.reader.template or hf.chat_template
        return {"tokenizer_class": type(hf).__name__, "chat_template": template, **special_tokens}


def _tokenize_body(server: Server, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        record = {
            "messages": [message.as_record() for message in body.messages],
            "tools": [tool.as_record() for tool in body.tools or ()],
            "chat_template_kwargs": template_options(
                server.reader, server.reader.template_source(), body.chat_template_kwargs, None
            ),
        }
        continues = bool(body.continue_final_message)
        return server.reader.tokens(record, "messages", continues)
    return server.reader.hf.encode(body.prompt, add_special_tokens=body.add_special_tokens)


def _add_generation(app: FastAPI, server: Server) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        adapter = server.adapter_of(body.model)
        hf = server.reader.hf
        _check_ids(body.prompts)
        prompts = [
            await server.tokenize(server.reader.tokens, prompt, "prompt") for prompt in body.prompts
        ]
        count = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        for prompt in prompts:
            # a prompt that fills the context can be scored without an answer
            if count or len(prompt) > server.max_context:
                server.check_length(len(prompt), count)
        more = {
            "max_new_tokens": count,
            "logprobs": body.logprobs,
            "adapter_name": adapter,
            "grammar": await server.tokenize(body.grammar),
        }
        echoed = None
        if body.echo:
            echoed = [
                prompt_part
                if isinstance(prompt_part, str)
                else await server.tokenize(hf.decode, prompt_part)
                for prompt_part in body.prompts
            ]
            more["prompt_logprobs"] = body.logprobs
        format = CompletionFormat(server.texts, body.logprobs)
        generation = server.generation(
            format, prompts, body.sampling(**more), body.include_usage, echoed
        )
        return await _answer_request(generation, request, bool(body.stream))

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        generation = await _plan_generation(server, body, body.include_usage)
        return await _answer_request(generation, request, bool(body.stream))

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        try:
            chat_request = body.as_chat()
        except ValidationError as error:
            raise ApiError(400, schemas.describe(error.errors()[0], [])[0], "input") from error
        generation = await _plan_generation(server, chat_request, include_usage=True)
        writer = ResponseWriter(body, generation.model)
        if body.stream:
            await generation.start()
            return _EventResponse(generation, _response_events(generation, writer))
        answer = await _unless_gone(generation, request)
        (choice,) = answer["choices"]
        writer.add(choice["message"])
        writer.finish(choice["finish_reason"], answer["usage"])
        return AsciiJSONResponse(writer.response)


async def _plan_generation(server: Server, body: ChatRequest, include_usage: bool) -> Generation:
    """Return the generation that answers a conversation."""
    adapter = server.adapter_of(body.model)
    plan = await server.tokenize(plan_chat, server.reader, body, server.tool_parser)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    limit = server.check_length(len(plan.prompt), getattr(body, name), name)
    top = (body.top_logprobs or 0) if body.logprobs else None
    more = {"max_new_tokens": limit, "logprobs": top, "adapter_name": adapter}
    sampling = body.sampling(**more, **plan.changes)
    chat_format = ChatFormat(server.texts, top, plan.answer_format)
    return server.generation(chat_format, [plan.prompt], sampling, include_usage)


def _check_ids(prompts: Sequence[str | list[int]]) -> None:
    """Refuse numbers that no tokenizer can decode; the engine checks the vocabulary."""
    for token in (token for prompt in prompts if isinstance(prompt, list) for token in prompt):
        if not 0 <= token < 1 << 31:
            raise ApiError(
                400,
                f"prompt: token {token} is not in the vocabulary: use the model's tokenizer",
                "prompt",
            )


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
