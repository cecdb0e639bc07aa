# SPDX-License-Identifier: Apache-2.0
"""Predictions as text, and as one HTML page that needs no network: a timeline of the pipeline and tables."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from megatron.bridge.autotune.time.simulate import PassSpan
from megatron.bridge.autotune.time.step import Prediction
from megatron.bridge.utils.html_table import html_table

KINDS = {
    "matrix": "matrix products",
    "attention": "attention",
    "memory": "norms, activations and other memory-bound kernels",
    "recompute": "recomputation",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "expert": "expert all-to-all",
    "host": "waiting for the CPU to launch kernels",
    "bubble": "pipeline bubble",
    "gradients": "gradient reduction",
    "parameters": "parameter gather",
    "optimizer": "optimizer step",
    "other": "other",
}
"""Kind of time in the split of a step -> its name in reports."""

_WIDTH, _ROW = 1200, 22  # of the picture in pixels
_SPANS = 20000  # at most in one picture; a longer schedule is truncated and the page says so
_COLORS = {
    "forward": ("#4878a8", "#8fb3d4"),
    "backward": ("#c8743c", "#e6b48f"),
}  # by even and odd chunk


def duration(seconds: float) -> str:
    """Format seconds in the largest unit that gives a value of two or more."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s"


def time_lines(prediction: Prediction, steps: int, gpus: str) -> Iterator[str]:
    """Summarize a predicted step in a run of ``steps``; ``gpus`` is a number and a name, such as ``8 x H100 80GB``."""
    seconds = prediction.seconds
    yield (
        f"time: {duration(seconds)} per step ({duration(prediction.low)} to {duration(prediction.high)}), "
        f"{duration(seconds * steps)} in total on {gpus}: {prediction.tokens_per_second:,.0f} tokens/s, "
        f"{prediction.mfu:.0%} of the bf16 peak (predicted, not measured)"
    )
    yield "where the time of the busiest stage goes: " + ", ".join(
        f"{KINDS[kind]} {part / seconds:.0%}"
        for kind, part in _largest_first(prediction.split)
        if part / seconds >= 0.005
    )


def _largest_first(split: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(split.items(), key=lambda item: -item[1])


def page(title: str, prediction: Prediction, sections: Iterable[tuple[str, str]]) -> str:
    """Return an HTML page with the timeline of ``prediction`` and ``sections``, pairs of a heading and HTML."""
    body = "".join(f"<h2>{escape(heading)}</h2>{html}" for heading, html in sections)
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"<h2>Pipeline</h2>{timeline(prediction)}<h2>Where the time goes</h2>{split_table(prediction)}{body}"
        "</body></html>\n"
    )


_STYLE = (
    "body{font:14px sans-serif;margin:24px;max-width:1300px}td,th{padding:2px 10px;text-align:right}"
    "td:first-child,th:first-child{text-align:left}svg{border:1px solid #ccc}"
)


def split_table(prediction: Prediction) -> str:
    """Return a table of seconds by kind, which add up to the step."""
    rows = [
        (KINDS[kind], f"{part:.4f}", f"{part / prediction.seconds:.1%}")
        for kind, part in _largest_first(prediction.split)
        if part
    ]
    return html_table(
        ("kind", "seconds", "part"), [*rows, ("step", f"{prediction.seconds:.4f}", "100.0%")]
    )


def scatter(points: Sequence[tuple[float, float, str]], front: int) -> str:
    """Return an SVG plot of layouts, GB against seconds; a line connects the first ``front`` points."""
    widest = 1.05 * max(x for x, _, _ in points)
    longest = 1.05 * max(y for _, y, _ in points)
    at = [(300 * x / widest + 40, 200 - 180 * y / longest, words) for x, y, words in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in at[:front])
    dots = "".join(
        f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4'><title>{escape(words)}</title></circle>"
        for x, y, words in at
    )
    axes = (
        f"<text x='320' y='214'>{widest:.0f} GB</text><text x='0' y='14'>{longest:.3g} s</text>"
        "<path d='M40 0V200H360' fill='none' stroke='#888'/>"
    )
    joined = f"<polyline points='{line}' fill='none' stroke='#c8743c'/>"
    return f"<svg width='720' height='440' viewBox='0 0 360 220' font-size='10'>{axes}{joined}{dots}</svg>"


def timeline(prediction: Prediction) -> str:
    """Return an SVG picture with one row per stage: forward passes blue, backward passes orange."""
    spans = prediction.timeline()
    shown = sorted(spans, key=lambda span: span.start)[:_SPANS]
    end = max(span.end for span in shown)
    height = _ROW * prediction.pipeline.stages
    boxes = "".join(_span_box(span, _WIDTH / end) for span in shown)
    cut = f"<p>The first {_SPANS} of {len(spans)} passes.</p>" if len(shown) < len(spans) else ""
    legend = (
        f"<p>Blue: forward, orange: backward; a lighter color marks every other virtual stage. {end:.3f} s "
        "in all; hover for the microbatch.</p>"
    )
    return f"<svg width='{_WIDTH}' height='{height}' viewBox='0 0 {_WIDTH} {height}'>{boxes}</svg>{cut}{legend}"


def _span_box(span: PassSpan, scale: float) -> str:
    work = span.work
    color = _COLORS[work.kind][work.chunk % 2]
    words = f"stage {span.stage}, {work.kind} of microbatch {work.microbatch}, chunk {work.chunk}: "
    words += f"{span.start:.4f} to {span.end:.4f} s"
    left = span.start * scale
    width = max((span.end - span.start) * scale - 0.3, 0.2)
    top = span.stage * _ROW + 1
    return (
        f"<rect x='{left:.2f}' y='{top}' width='{width:.2f}' height='{_ROW - 2}' fill='{color}'>"
        f"<title>{words}</title></rect>"
    )
