# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Run the server: port, ranks, signals, and the checks before all endpoints.

The checks cover the API key, the host name, the size of the body, and clients that stall.
"""

import asyncio
import hmac
import logging
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from megatron.bridge.inference import llm as llm_module
from megatron.bridge.inference.conversations.tool_parsers import find_tool_format
from megatron.bridge.inference.pooling import PoolingFacts, open_model
from megatron.bridge.inference.requests import NOT_FINITE, Sampling
from megatron.bridge.inference.server.adapter_endpoints import add_adapter_endpoints
from megatron.bridge.inference.server.app import Server, make_app
from megatron.bridge.inference.server.engine_client import EngineClient, EngineGoneError
from megatron.bridge.inference.server.errors import ApiError, SlowReaderError, to_json
from megatron.bridge.inference.server.metrics import Metrics
from megatron.bridge.inference.server.planner import RequestPlanner
from megatron.bridge.inference.server.pooling_app import PoolingServer, make_pooling_app
from megatron.bridge.inference.workers import Workers
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.telemetry import RequestSpans, Telemetry

LARGE_PATHS = frozenset(
    {
        *("/v1/chat/completions", "/v1/responses"),
        *("/v1/embeddings", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank"),
    }
)
"""Endpoints whose bodies may contain images, audio or many texts."""
OPEN_PATHS = (
    "/",
    "/health",
    "/ping",
)  # need no key: the chat page asks for it, and load balancers have none
TEXT_BYTES, IMAGE_BYTES = (
    1 << 20,
    32 << 20,
)  # size limits of bodies without and with images or audio
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@dataclass(frozen=True)
class GuardConfig:
    """Conditions that requests must meet."""

    key: str | None = None  # required in every request; None allows all requests
    # host names that requests may use; this blocks web pages that point their own host name at this machine. None
    # allows any name
    hosts: frozenset[str] | None = None
    body_bytes: int = TEXT_BYTES  # maximum size of a body
    seconds: float = (
        30.0  # maximum time for a client to send its body, or to read a part of the response
    )
    large_paths: frozenset[str] = LARGE_PATHS  # endpoints whose bodies may exceed ``TEXT_BYTES``
    open_paths: tuple[str, ...] = OPEN_PATHS  # endpoints that need no key
    media_types: tuple[str, ...] = ("application/json",)  # of bodies; JSON includes ``+json``
    key_header: bytes | None = None  # another header that may hold the key, in lower case


class Guard:
    """ASGI middleware that checks requests."""

    def __init__(self, app: Any, config: GuardConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            refused = self._refusal(scope)
            byte_limit = (
                self._config.body_bytes
                if scope["path"] in self._config.large_paths
                else min(self._config.body_bytes, TEXT_BYTES)
            )
            # a client that is still sending when the connection closes would not read the response
            body = await asyncio.wait_for(
                _read_body(receive, byte_limit, keep=refused is None), self._config.seconds
            )
            if refused is not None:
                raise refused
        except TimeoutError:
            await _refuse_request(
                send, ApiError(408, f"the body did not arrive within {self._config.seconds:.0f} s")
            )
            return
        except ApiError as error:
            await _refuse_request(send, error)
            return
        if body is None:
            return
        if scope["method"] == "OPTIONS":
            await _answer_options(send)
            return
        try:
            await self._app(
                _with_content_type(scope), _replay_body(body, receive), self._in_time(send)
            )
        except SlowReaderError as error:
            sys.stderr.write(f"{scope['method']} {scope['path']}: {error}\n")

    def _refusal(self, scope: Message) -> ApiError | None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        host = _host_name(headers.get(b"host", b"").decode("latin-1"))
        if self._config.hosts is not None and host not in self._config.hosts:
            return ApiError(
                403, f"host {host!r} is not this server: call it as {sorted(self._config.hosts)[0]}"
            )
        is_from_page = b"origin" in headers or b"sec-fetch-site" in headers
        if scope["method"] == "POST" and b"content-type" not in headers and is_from_page:
            # a page of another origin may send such a body without asking first
            return ApiError(415, "the content type is missing: send application/json")
        content_type = headers.get(b"content-type", b"application/json").decode("latin-1")
        is_known_type = _is_json(content_type) or content_type in self._config.media_types
        if scope["method"] == "POST" and not is_known_type:
            return ApiError(
                415,
                f"the content type {content_type!r} is not JSON: send the header "
                "Content-Type: application/json",
            )
        is_open = scope["path"] in self._config.open_paths or scope["method"] == "OPTIONS"
        if self._config.key is None or is_open or self._has_key(headers, self._config.key):
            return None
        return ApiError(
            401,
            "the API key is missing or wrong: send Authorization: Bearer KEY",
            code="invalid_api_key",
        )

    def _has_key(self, headers: dict[bytes, bytes], key: str) -> bool:
        """Return whether the headers of a request have the key."""
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), key.encode()):
            return True
        if self._config.key_header is None:
            return False
        given = headers.get(self._config.key_header, b"")
        return hmac.compare_digest(given.strip(), key.encode())

    def _in_time(self, send: Send) -> Send:
        """Wrap ``send`` with a timeout for clients that do not read; the server then closes the connection."""

        async def timed(message: Message) -> None:
            try:
                await asyncio.wait_for(send(message), self._config.seconds)
            except TimeoutError as error:
                raise SlowReaderError(
                    f"the client has not read its answer for {self._config.seconds:.0f} s: the request is aborted"
                ) from error

        return timed


def drop_note_of_uvicorn() -> None:
    """Leave out uvicorn's line about an unfinished answer, which follows the guard's line about the reason."""
    logger = logging.getLogger("uvicorn.error")
    logger.addFilter(lambda record: "without completing response" not in record.getMessage())


def _with_content_type(scope: Message) -> Message:
    """Return the scope of a request whose body is JSON unless the client says otherwise."""
    headers = scope["headers"]
    if scope["method"] != "POST" or any(name.lower() == b"content-type" for name, _ in headers):
        return scope
    return {**scope, "headers": [*headers, (b"content-type", b"application/json")]}


def _is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    main_type, _, subtype = media_type.partition("/")
    return main_type == "application" and (subtype == "json" or subtype.endswith("+json"))


def _host_name(value: str) -> str:
    """Return ``host`` of ``host``, ``host:port`` or ``[address]:port``."""
    if value.startswith("["):
        return value[1:].partition("]")[0].lower()
    return value.rpartition(":")[0].lower() if value.count(":") == 1 else value.lower()


async def _read_body(receive: Receive, byte_limit: int, keep: bool) -> bytes | None:
    """Read the body of a request (empty unless ``keep``), or None if the client has disconnected.

    A body that is too large is read to its end and dropped: a client that is still sending when the connection
    closes sees a reset connection and not the response.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > byte_limit:
            parts.clear()
        elif keep:
            parts.append(part)
        if not message.get("more_body"):
            break
    if size > byte_limit:
        raise ApiError(
            413, f"the body exceeds {byte_limit} bytes: send a shorter prompt, or several requests"
        )
    return b"".join(parts)


def _replay_body(body: bytes, receive: Receive) -> Receive:
    first = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay


async def _answer_options(send: Send) -> None:
    """Answer a browser's question about requests of pages of other origins: none are allowed."""
    headers = [(b"allow", b"GET, POST, OPTIONS")]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def _refuse_request(send: Send, error: ApiError) -> None:
    """Send an error and close the connection, because the client may still be sending the body."""
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": to_json(error.body)})


_FAILED_SECONDS = 3  # time to tell all clients that the engine has ended


@dataclass(frozen=True)
class ServeConfig:
    name: str  # name of the model
    host: str = "127.0.0.1"  # address to listen on; any other than the loopback address needs a key
    port: int = 8000  # 0 chooses a free port
    api_key: str | None = None  # required in every request
    max_queue: int = 256  # maximum waiting choices in addition to running ones
    request_seconds: float = 600.0  # time limit of a request
    drain_seconds: float = 600.0  # time limit of running requests after SIGTERM
    tool_parser: str | None = None  # format of calls of tools; None takes the chat template's
    adapter_root: Path | None = None  # folder of adapters that clients may load and unload
    otel_service_name: str | None = None  # name of the service in OpenTelemetry; None sends nothing


def serve(path: str, options: dict[str, Any], config: ServeConfig) -> None:
    """Serve a model until SIGTERM or SIGINT."""
    if config.host not in LOOPBACK and config.api_key is None:
        raise UserError(
            f"--host {config.host} can be reached by others: give --api-key-file, or leave the host at 127.0.0.1"
        )
    find_tool_format("", config.tool_parser)  # refuses unknown names
    size = llm_module.ranks_of(options)
    with bound_socket(config) as sock, Workers(size, open_model, path, options) as workers:
        (facts,) = workers.iterate("yield_facts", ())
        if isinstance(facts, PoolingFacts):
            _refuse_idle_options(path, facts, options, config)
            pooling_server = PoolingServer(
                config.name, facts, workers, int(time.time()), config.request_seconds
            )
            _PoolingRun(pooling_server, config).run(sock)
            return
        reader, max_context, _ = facts
        if reader.hf is None:
            raise UserError(f"{path} has no tokenizer, which a server needs: give --tokenizer")
        adapters = tuple(options.get("adapters") or ())
        if config.name in adapters:
            raise UserError(
                f"--adapters {config.name} is the name of the model itself: choose another, or give --name"
            )
        planner = RequestPlanner(config.name, reader, max_context, adapters, config.tool_parser)
        server = Server(planner, config.request_seconds, int(time.time()))
        _GenerationRun(server, workers, config, options.get("max_requests", 32)).run(sock)


@contextmanager
def bound_socket(config: ServeConfig) -> Iterator[socket.socket]:
    """Bind a socket to the port before the model is loaded."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((config.host, config.port))
        except OSError as error:
            raise UserError(
                f"--host {config.host} --port {config.port} cannot be used ({error.strerror}): choose another port"
            ) from error
        yield sock


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: with them, it would exit with SIGTERM's exit code after draining."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _refuse_idle_options(
    path: str, facts: PoolingFacts, options: dict[str, Any], config: ServeConfig
) -> None:
    """Refuse options of servers that generate."""
    idle = {
        "--adapters": options.get("adapters"),
        "--chat-template": options.get("template"),
        "--tool-parser": config.tool_parser,
        "--adapter-root": config.adapter_root,
        "--speculative": options.get("speculative"),
    }
    for option, value in idle.items():
        if value:
            raise UserError(
                f"{path} has head={facts.head}, so {option} has no effect: leave it out"
            )


class ServerRun(ABC):
    """A server from its start to its end.

    Args:
        server: State of the endpoints, with ``name`` and ``is_ready``.
        config: Address, limits and key.
    """

    def __init__(self, server: Any, config: ServeConfig) -> None:
        self._server = server
        self._config = config
        self._reason: str | None = None
        self._drains = False

    @abstractmethod
    def _make_app(self) -> tuple[Any, int]:
        """Return the application, and the maximum bytes of a body."""

    @abstractmethod
    async def _warm_up(self) -> None:
        """Compute a request, so that the server reports ready only when the model works."""

    def run(self, sock: socket.socket) -> None:
        """Serve until a signal."""
        app, body_bytes = self._make_app()
        app.router.lifespan_context = self._lifespan
        drop_note_of_uvicorn()
        guarded: Any = Guard(app, self._make_guard_config(body_bytes))
        telemetry = self._make_telemetry()
        if telemetry is not None:
            guarded = RequestSpans(guarded, telemetry)
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                guarded,
                lifespan="on",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(self._config.drain_seconds),
                timeout_keep_alive=30,
                h11_max_incomplete_event_size=16384,
            )
        )
        self._uvicorn.run(sockets=[sock])
        if telemetry is not None:
            telemetry.close()
        if self._reason is not None:
            raise UserError(f"the server has ended: {self._reason}")

    def _make_guard_config(self, body_bytes: int) -> GuardConfig:
        hosts = LOOPBACK | {self._config.host} if self._config.api_key is None else None
        return GuardConfig(self._config.api_key, hosts, body_bytes)

    def _make_telemetry(self) -> Telemetry | None:
        service = self._config.otel_service_name
        if service is None:
            return None
        key = f"--otel-service-name {service}"
        model = {"gen_ai.request.model": self._config.name}
        return Telemetry(service, key, model, is_setting=False)

    @asynccontextmanager
    async def _lifespan(self, _: Any) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, self._stop)
        self._begin()
        warming = asyncio.create_task(self._become_ready())
        yield
        warming.cancel()
        await self._end()

    def _begin(self) -> None:  # noqa: B027 - not every server has something to do
        """Connect the application with the model, in the event loop."""

    async def _end(self) -> None:  # noqa: B027
        """Clean up when the server has answered its last request."""

    async def _become_ready(self) -> None:
        try:
            await self._warm_up()
        except EngineGoneError:
            return
        except (UserError, ApiError) as error:
            self._failed(str(error))
            return
        self._server.is_ready = True
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        port = self._uvicorn.servers[0].sockets[0].getsockname()[1]
        sys.stdout.write(f"serving {self._server.name} at http://{host}:{port}\n")
        sys.stdout.flush()

    def _stop(self) -> None:
        """Finish running requests and accept no new ones; a second signal ends the server immediately."""
        self._server.is_ready = False
        self._uvicorn.force_exit = self._drains
        self._drains = self._uvicorn.should_exit = True

    def _failed(self, reason: str) -> None:
        self._server.is_ready = False
        self._reason = self._reason or reason
        self._uvicorn.config.timeout_graceful_shutdown = _FAILED_SECONDS
        self._uvicorn.should_exit = True


class _GenerationRun(ServerRun):
    """A server that generates."""

    def __init__(
        self, server: Server, workers: Workers, config: ServeConfig, max_requests: int
    ) -> None:
        super().__init__(server, config)
        self._workers = workers
        self._capacity = max_requests + config.max_queue

    def _make_app(self) -> tuple[Any, int]:
        has_images = self._server.planner.reader.media is not None
        app = make_app(self._server)
        add_adapter_endpoints(app, self._server, self._config.adapter_root)
        return app, IMAGE_BYTES if has_images else TEXT_BYTES

    def _begin(self) -> None:
        client = EngineClient(self._workers, self._capacity, self._failed)
        self._server.client = client
        self._server.metrics = Metrics(self._server.name, lambda: client.load)

    async def _warm_up(self) -> None:
        stream = self._server.client.submit([0], Sampling(max_new_tokens=1))
        await stream.accepted()
        async for progress in stream.progress():
            if progress.finish_reason == "error":
                raise UserError(NOT_FINITE)


class _PoolingRun(ServerRun):
    """A server that scores or embeds."""

    def _make_app(self) -> tuple[Any, int]:
        return make_pooling_app(self._server), IMAGE_BYTES

    async def _warm_up(self) -> None:
        await self._server.pool([[0]])
