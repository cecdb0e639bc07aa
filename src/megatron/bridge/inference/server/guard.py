# SPDX-License-Identifier: Apache-2.0
"""What stands before all endpoints: the key, the name of the host, the size of a body, and readers that stall."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from megatron.bridge.inference.server.errors import ApiError, to_json

IMAGE_PATH = "/v1/chat/completions"  # whose bodies may hold images
OPEN_PATHS = ("/", "/health")  # answered without a key: the chat page asks for it, and load balancers have none
TEXT_BYTES, IMAGE_BYTES = 1 << 20, 32 << 20  # bodies of text, and with images in them
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@dataclass(frozen=True)
class GuardConfig:
    """What is let through."""

    key: str | None = None  # that every request must have; None lets all through
    # names under which the server may be called, against pages that point a name of their own at this machine; None
    # allows any
    hosts: frozenset[str] | None = None
    body_bytes: int = TEXT_BYTES  # size of the largest body
    seconds: float = 30.0  # how long a client may take to send its body, or to read a piece of the answer


class Guard:
    """ASGI middleware."""

    def __init__(self, app: Any, config: GuardConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            refused = self._refusal(scope)
            most = self._config.body_bytes if scope["path"] == IMAGE_PATH else min(self._config.body_bytes, TEXT_BYTES)
            # a client that still sends when the connection is closed would lose the answer
            body = await asyncio.wait_for(_read(receive, most, keep=refused is None), self._config.seconds)
            if refused is not None:
                raise refused
        except TimeoutError:
            await _refuse(send, ApiError(408, f"the body did not arrive within {self._config.seconds:.0f} s"))
            return
        except ApiError as error:
            await _refuse(send, error)
            return
        if body is not None:
            await self._app(scope, _replayed(body, receive), self._in_time(send))

    def _refusal(self, scope: Message) -> ApiError | None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        host = _host_name(headers.get(b"host", b"").decode("latin-1"))
        if self._config.hosts is not None and host not in self._config.hosts:
            return ApiError(403, f"host {host!r} is not this server: call it as {sorted(self._config.hosts)[0]}")
        if self._config.key is None or scope["path"] in OPEN_PATHS:
            return None
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._config.key.encode()):
            return ApiError(
                401, "the API key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key"
            )
        return None

    def _in_time(self, send: Send) -> Send:
        """``send`` that gives up on clients that do not read: the server then closes the connection."""

        async def timed(message: Message) -> None:
            await asyncio.wait_for(send(message), self._config.seconds)

        return timed


def _host_name(value: str) -> str:
    """``host`` of ``host``, ``host:port`` or ``[address]:port``."""
    if value.startswith("["):
        return value[1:].partition("]")[0].lower()
    return value.rpartition(":")[0].lower() if value.count(":") == 1 else value.lower()


async def _read(receive: Receive, most: int, keep: bool) -> bytes | None:
    """The body of a request, or nothing of it unless ``keep``; None if the client has left."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        parts += [part] if keep else []
        if size > most:
            raise ApiError(413, f"the body exceeds {most} bytes: send a shorter prompt, or several requests")
        if not message.get("more_body"):
            return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    first = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay


async def _refuse(send: Send, error: ApiError) -> None:
    """Answer with an error and close the connection: the rest of the body may still be on its way."""
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": to_json(error.body)})
