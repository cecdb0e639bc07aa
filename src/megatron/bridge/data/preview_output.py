# SPDX-License-Identifier: Apache-2.0
"""A preview for the terminal, in colours, and as an HTML page that needs nothing else."""

import html
from collections.abc import Iterator

from rich.console import Console, ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text

from megatron.bridge.data.preview import Piece, Preview, RankBatch, SplitPreview

LEARNT, GIVEN = "bold green", "dim"
BAR = 40  # characters of the longest bar
STYLE = """
body { font-family: sans-serif; margin: 2rem auto; max-width: 60rem; color: #222; background: #fff; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #ccc; padding: .6rem; }
.learnt { background: #c8f0cf; } .given { color: #666; }
table { border-collapse: collapse; } td, th { padding: .15rem .6rem; text-align: right; }
.bar { background: #5a8fd6; height: .8rem; display: inline-block; }
"""


def to_console(console: Console, preview: Preview) -> None:
    """Print it."""
    for split in preview.splits:
        console.print(_split(split))
    for corpus in preview.corpora:
        console.print(Text(corpus.name, style="bold underline"), *map(Text, corpus.lines()), "", sep="\n")
    for number, sample in enumerate(preview.texts, start=1):
        console.print(Text(f"row {number} begins", style="bold"), _text(sample), sep="\n")
    if preview.first_batches:
        console.print(_batches(preview.first_batches))


def _split(split: SplitPreview) -> ConsoleRenderable:
    lines: list[ConsoleRenderable] = [Text(split.name, style="bold underline")]
    lines += [Text(line) for line in summary(split)]
    lines.append(_histogram(split))
    for number, sample in enumerate(split.samples, start=1):
        lines += [Text(f"sample {number}", style="bold"), _text(sample)]
    return Group(*lines, Text())


def summary(split: SplitPreview) -> Iterator[str]:
    """Counts, lengths and packing, one sentence each."""
    yield f"{split.report.records:,} records: {'; '.join(split.report.lines())}"
    yield f"length: mean {split.mean:.0f}, median {split.median:.0f}, longest {split.longest:,} tokens"
    fill = "" if split.fill is None else f", {split.fill:.2%} of them not padding"
    yield f"{split.rows:,} rows in an epoch{fill}"


def _histogram(split: SplitPreview) -> Table:
    table = Table(box=None, show_header=False)
    most = max(count for _, count in split.histogram)
    for length, count in split.histogram:
        table.add_row(f"to {length:,}", "#" * round(BAR * count / most), f"{count:,}")
    return table


def _text(sample: list[Piece]) -> Text:
    """Learnt and given text in two colours; without colours, learnt text stands in brackets."""
    shown = Text()
    for piece in sample:
        shown.append(
            f"\u27e6{piece.text}\u27e7" if piece.learnt else piece.text, LEARNT if piece.learnt else GIVEN
        )
    learnt = sum(piece.tokens for piece in sample if piece.learnt)
    shown.append(f"\n({learnt:,} of {sum(piece.tokens for piece in sample):,} tokens are learnt)", "italic")
    return shown


def _batches(batches: list[RankBatch]) -> Table:
    table = Table("data rank", "samples", "sequences", "tokens", "learnt", title="first microbatch", box=None)
    for batch in batches:
        table.add_row(*_cells(batch))
    return table


def _cells(batch: RankBatch) -> list[str]:
    numbers = ", ".join(map(str, batch.samples))
    return [str(batch.rank), numbers, f"{batch.sequences:,}", f"{batch.tokens:,}", f"{batch.learnt:,}"]


def to_html(preview: Preview) -> str:
    """A whole page."""
    parts = ["<!doctype html><html><head><meta charset='utf-8'><title>Data preview</title>"]
    parts.append(f"<style>{STYLE}</style></head><body><h1>Data preview</h1>")
    parts.append("<p>The loss is taken on <span class='learnt'>marked</span> text.</p>")
    for split in preview.splits:
        parts += _html_split(split)
    for corpus in preview.corpora:
        parts.append(f"<h2>{html.escape(corpus.name)}</h2>")
        parts += [f"<p>{html.escape(line)}</p>" for line in corpus.lines()]
    parts += map(_html_sample, preview.texts)
    if preview.first_batches:
        parts.append("<h2>First microbatch of each data-parallel rank</h2><table>")
        parts.append(_html_row("th", ["data rank", "samples", "sequences", "tokens", "learnt"]))
        parts += [_html_row("td", _cells(batch)) for batch in preview.first_batches]
        parts.append("</table>")
    return "\n".join([*parts, "</body></html>\n"])


def _html_split(split: SplitPreview) -> Iterator[str]:
    yield f"<h2>{html.escape(split.name)}</h2>"
    yield "".join(f"<p>{html.escape(line)}</p>" for line in summary(split))
    most = max(count for _, count in split.histogram)
    yield "<table>"
    for length, count in split.histogram:
        bar = f"<span class='bar' style='width:{20 * count / most:.1f}rem'></span>"
        yield f"<tr><td>to {length:,}</td><td style='text-align:left'>{bar}</td><td>{count:,}</td></tr>"
    yield "</table>"
    yield from map(_html_sample, split.samples)


def _html_sample(sample: list[Piece]) -> str:
    spans = (
        f"<span class='{'learnt' if piece.learnt else 'given'}'>{html.escape(piece.text)}</span>"
        for piece in sample
    )
    return f"<pre>{''.join(spans)}</pre>"


def _html_row(kind: str, cells: list[str]) -> str:
    return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells) + "</tr>"
