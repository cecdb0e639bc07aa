# SPDX-License-Identifier: Apache-2.0
"""Markdown of answers as HTML."""

from markdown_it import MarkdownIt


def render_markdown(text: str) -> str:
    """Convert Markdown with tables to HTML that runs no code and loads nothing.

    HTML in ``text`` is shown as text, and an image is a link to it.
    """
    markdown = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    return markdown.disable("image").render(text)
