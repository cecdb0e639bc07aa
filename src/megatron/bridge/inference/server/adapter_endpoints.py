# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Load and unload adapters through the API, with the bodies of vLLM."""

import asyncio
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from pydantic import Field

from megatron.bridge.inference.conversations.options import Strict, Text
from megatron.bridge.inference.server.app import Server
from megatron.bridge.inference.server.errors import ApiError
from megatron.bridge.inference.server.planner import check_model_name

_NAME = r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,127}$"


class LoadAdapterRequest(Strict):
    """The body of ``/v1/load_lora_adapter``."""

    lora_name: Text = Field(pattern=_NAME)
    lora_path: Text = Field(min_length=1, max_length=4096)


class UnloadAdapterRequest(Strict):
    """The body of ``/v1/unload_lora_adapter``."""

    lora_name: Text


def add_adapter_endpoints(app: FastAPI, server: Server, root: Path | None) -> None:
    """Add the endpoints.

    Args:
        app: The application.
        server: State of the server.
        root: Folder that must contain the adapters; None refuses changes.
    """
    planner = server.planner
    one_at_a_time = asyncio.Lock()

    @app.post("/v1/load_lora_adapter")
    async def load_adapter(body: LoadAdapterRequest) -> PlainTextResponse:
        folder = _find_folder(root, body.lora_path)
        assert server.client is not None
        async with one_at_a_time:
            if body.lora_name in (planner.name, *planner.adapters):
                message = f"lora_name={body.lora_name!r} is served: unload it first, or choose another name"
                raise ApiError(400, message, "lora_name")
            await server.client.load_adapter(body.lora_name, str(folder))
            planner.adapters = (*planner.adapters, body.lora_name)
        return PlainTextResponse(f"adapter {body.lora_name} is loaded")

    @app.post("/v1/unload_lora_adapter")
    async def unload_adapter(body: UnloadAdapterRequest) -> PlainTextResponse:
        _check_allowed(root)
        assert server.client is not None
        async with one_at_a_time:
            if body.lora_name == planner.name:
                message = f"lora_name={body.lora_name!r} is the model itself: only adapters can be unloaded"
                raise ApiError(400, message, "lora_name")
            check_model_name(body.lora_name, planner.adapters)
            planner.adapters = tuple(name for name in planner.adapters if name != body.lora_name)
            await server.client.unload_adapter(body.lora_name)
        return PlainTextResponse(f"adapter {body.lora_name} is unloaded")


def _check_allowed(root: Path | None) -> Path:
    if root is None:
        raise ApiError(
            403, "adapters cannot be changed here: start the server with --adapter-root DIR"
        )
    return root


def _find_folder(root: Path | None, given: str) -> Path:
    """Return the folder of an adapter, and refuse one that is outside of the root."""
    allowed = _check_allowed(root).resolve()
    folder = (allowed / given).resolve()
    if not folder.is_relative_to(allowed):
        raise ApiError(403, f"lora_path={given!r:.200} is outside of --adapter-root", "lora_path")
    if not folder.is_dir():
        raise ApiError(404, f"lora_path={given!r:.200} is no folder in --adapter-root", "lora_path")
    return folder
