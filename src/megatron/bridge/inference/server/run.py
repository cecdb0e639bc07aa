# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""A server from its start to its end: the port, the ranks, the signals."""

import asyncio
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from megatron.bridge.inference import llm as llm_module
from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.inference.server.app import Server, make_app
from megatron.bridge.inference.server.engine_client import EngineClient, EngineGoneError
from megatron.bridge.inference.server.guard import IMAGE_BYTES, LOOPBACK, TEXT_BYTES, Guard, GuardConfig
from megatron.bridge.inference.server.metrics import Metrics
from megatron.bridge.inference.workers import Workers
from megatron.bridge.utils.errors import UserError

_FAILED_SECONDS = 3  # to tell all clients that the engine has ended


@dataclass(frozen=True)
class ServeConfig:
    """How a model is served."""

    name: str  # of the model
    host: str = "127.0.0.1"  # address to listen on; one that is not the loopback's needs a key
    port: int = 8000  # 0 takes a free one
    api_key: str | None = None  # that every request must have
    max_queue: int = 256  # choices that may wait beside those that run
    request_seconds: float = 600.0  # until a request is given up
    drain_seconds: float = 600.0  # that running requests may take after SIGTERM


def serve(path: str, options: dict[str, Any], config: ServeConfig) -> None:
    """Serve a model until SIGTERM or SIGINT."""
    if config.host not in LOOPBACK and config.api_key is None:
        raise UserError(
            f"--host {config.host} can be reached by others: give --api-key-file, or leave the host at 127.0.0.1"
        )
    size = llm_module.ranks_of(options)
    with _bound(config) as sock, Workers(size, LLM, path, options) as workers:
        ((reader, max_context, _),) = workers.iterate("facts", ())
        if reader.hf is None:
            raise UserError(f"{path} has no tokenizer, which a server needs: give --tokenizer")
        adapters = tuple(options.get("adapters") or ())
        if config.name in adapters:
            raise UserError(f"--adapters {config.name} is the name of the model itself: choose another, or give --name")
        facts = (reader, max_context, config.request_seconds, int(time.time()), adapters)
        server = Server(config.name, *facts)
        _Run(server, workers, config, options.get("max_requests", 32)).run(sock)


@contextmanager
def _bound(config: ServeConfig) -> Iterator[socket.socket]:
    """The port, taken before the model is loaded."""
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
    """uvicorn that leaves signals to ``_Run``: by itself it would end with SIGTERM's exit code after a drain."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Run:
    def __init__(self, server: Server, workers: Workers, config: ServeConfig, max_requests: int) -> None:
        self._server, self._workers, self._config = server, workers, config
        self._capacity = max_requests + config.max_queue
        self._reason: str | None = None
        self._drains = False

    def run(self, sock: socket.socket) -> None:
        hosts = LOOPBACK | {self._config.host} if self._config.api_key is None else None
        app = make_app(self._server)
        body_bytes = TEXT_BYTES if self._server.reader.media is None else IMAGE_BYTES
        app.router.lifespan_context = self._lifespan
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                Guard(app, GuardConfig(self._config.api_key, hosts, body_bytes)),
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
        if self._reason is not None:
            raise UserError(f"the server has ended: {self._reason}")

    @asynccontextmanager
    async def _lifespan(self, _: Any) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        client = EngineClient(self._workers, self._capacity, self._failed)
        self._server.client = client
        self._server.metrics = Metrics(self._server.name, lambda: client.load)
        warming = asyncio.create_task(self._warm_up(client))
        yield
        warming.cancel()

    async def _warm_up(self, client: EngineClient) -> None:
        """Generate a token; only then is the server ready."""
        stream = client.submit([0], Sampling(max_new_tokens=1))
        try:
            await stream.accepted()
            async for _ in stream.progress():
                pass
        except EngineGoneError:
            return
        except UserError as error:
            self._failed(str(error))
            return
        self._server.is_ready = True
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        port = self._uvicorn.servers[0].sockets[0].getsockname()[1]
        sys.stdout.write(f"serving {self._server.name} at http://{host}:{port}\n")
        sys.stdout.flush()

    def _stop(self) -> None:
        """End what runs, take nothing new; the second signal ends at once."""
        self._server.is_ready = False
        self._uvicorn.force_exit = self._drains
        self._drains = self._uvicorn.should_exit = True

    def _failed(self, reason: str) -> None:
        self._server.is_ready = False
        self._reason = self._reason or reason
        self._uvicorn.config.timeout_graceful_shutdown = _FAILED_SECONDS
        self._uvicorn.should_exit = True
