# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""The chat page, and the HTML of the answers that it shows."""

import asyncio
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, Field

from megatron.bridge.inference.server.markdown import render_markdown

_PAGE = Path(__file__).parent / "page.html"
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class RenderRequest(BaseModel):
    """The body of ``/render``."""

    text: str = Field(max_length=1_000_000)


def add_page(app: FastAPI) -> None:
    """Add the page, and ``/render``, which turns Markdown into HTML."""
    page = _PAGE.read_text(encoding="utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def chat_page() -> HTMLResponse:
        return HTMLResponse(page, headers=_HEADERS)

    @app.post("/render", response_class=HTMLResponse)
    async def render(body: RenderRequest) -> HTMLResponse:
        html = await asyncio.to_thread(render_markdown, body.text)
        return HTMLResponse(html, headers=_HEADERS)
