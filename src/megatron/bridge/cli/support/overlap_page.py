# SPDX-License-Identifier: Apache-2.0
"""A web page that shows when ranks compute and communicate; it needs no network."""

from html import escape

from megatron.bridge.utils.profiler_overlap import Interval, Overlap

_WIDTH = 1200  # pixels of the picture
_HEIGHT = 18  # of a row
_NARROWEST = 0.3  # a shorter box would not be visible
_MOST_BOXES = 20_000  # in a row
_STYLE = (
    "body{font:14px sans-serif;margin:24px}td,th{padding:2px 10px;text-align:right}"
    "td:first-child,th:first-child{text-align:left}svg{border:1px solid #ccc}"
    ".c{fill:#4878a8}.h{fill:#8fb98f}.e{fill:#c8443c}.i{fill:#ddd}"
)
_LEGEND = (
    "<p>Blue: computation. Green: communication during computation. Red: communication that the rank waits for. "
    "Gray: neither. Hover over a message for its kind.</p>"
)


def overlap_page(title: str, overlaps: dict[int, Overlap], tables: str) -> str:
    """Return the page: a bar and a timeline for each rank.

    Args:
        title: Heading.
        overlaps: Overlap by rank.
        tables: HTML that follows the pictures.
    """
    rows = "".join(
        f"<h3>rank {rank}</h3>{_bar(overlap)}{_timeline(overlap)}"
        for rank, overlap in overlaps.items()
    )
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>"
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{_LEGEND}{rows}{tables}</body></html>\n"
    )


def _bar(overlap: Overlap) -> str:
    """Return one bar whose parts add up to the time of the steps."""
    only_computing = overlap.computing - overlap.hidden
    parts = {
        "c": (only_computing, "computation alone"),
        "h": (overlap.hidden, "communication during computation"),
        "e": (overlap.exposed, "communication alone"),
        "i": (overlap.idle, "neither"),
    }
    boxes = []
    left = 0.0
    for css_class, (seconds, words) in parts.items():
        width = _WIDTH * seconds / overlap.seconds
        label = f"{words}: {seconds * 1e3:.1f} ms, {seconds / overlap.seconds:.0%}"
        boxes.append(_box(css_class, left, width, 0, label))
        left += width
    return _svg(boxes, 1)


def _timeline(overlap: Overlap) -> str:
    """Return a row of computation above a row of messages."""
    computing = [
        _at(overlap, interval, "c", 0, "") for interval in overlap.compute_intervals[:_MOST_BOXES]
    ]
    messages = [
        _at(overlap, message.interval, "e", 1, f"{message.kind} {message.group}")
        for message in overlap.messages[:_MOST_BOXES]
    ]
    return _svg(computing + messages, 2)


def _at(overlap: Overlap, interval: Interval, css_class: str, row: int, words: str) -> str:
    first, last = overlap.window
    scale = _WIDTH / (last - first)
    start, end = interval
    width = max((end - start) * scale, _NARROWEST)
    label = f"{words}: {(end - start) / 1e3:.3f} ms".strip(": ")
    return _box(css_class, (start - first) * scale, width, row, label)


def _box(css_class: str, left: float, width: float, row: int, words: str) -> str:
    return (
        f"<rect class='{css_class}' x='{left:.2f}' y='{row * _HEIGHT}' width='{width:.2f}' "
        f"height='{_HEIGHT - 2}'><title>{escape(words)}</title></rect>"
    )


def _svg(boxes: list[str], rows: int) -> str:
    height = rows * _HEIGHT
    return f"<svg width='{_WIDTH}' height='{height}' viewBox='0 0 {_WIDTH} {height}'>{''.join(boxes)}</svg><br>"
