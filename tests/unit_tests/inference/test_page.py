# SPDX-License-Identifier: Apache-2.0
"""The HTML of an answer runs nothing and loads nothing."""

from html.parser import HTMLParser

import pytest

from megatron.bridge.inference.server.markdown import render_markdown

HARMLESS = {
    "p": set(),
    "a": {"href", "title"},
    "strong": set(),
    "em": set(),
    "code": {"class"},
    "pre": set(),
}


class Elements(HTMLParser):
    """Collect the elements of a page and the names of their attributes."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def elements_of(text):
    parser = Elements()
    parser.feed(render_markdown(text))
    return parser.found


def test_code_lists_and_tables():
    text = "# Title\n\n1. one\n2. two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nx < 1\n```\n"
    html = render_markdown(text)
    assert "<h1>Title</h1>" in html
    assert "<li>two</li>" in html
    assert "<td>2</td>" in html
    assert '<pre><code class="language-python">x &lt; 1\n</code></pre>' in html


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "[x](javascript:alert(1))",
        "[x](data:text/html;base64,AAAA)",
        "![x](https://example.com/pixel.png)",
        '[x](https://example.com "a" onclick=alert(1)")',
        "`<iframe>`",
        "<a href='javascript:1'>x</a>",
        "[x]: javascript:alert(1)\n\n[x]",
    ],
)
def test_nothing_runs_and_nothing_is_loaded(text):
    for tag, attributes in elements_of(text):
        assert tag in HARMLESS, (tag, text)
        assert attributes.keys() <= HARMLESS[tag]
        assert attributes.get("href", "https:").startswith("https:")


def test_deeply_nested_text_ends():
    assert render_markdown("> " * 2000 + "x")
    assert render_markdown("[" * 5000 + "x")
