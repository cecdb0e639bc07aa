# SPDX-License-Identifier: Apache-2.0
"""A preview on the console, in color, and the same as an HTML page."""

import base64
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console, ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text

from megatron.bridge.data.media.audio_files import decode_audio, wav_file
from megatron.bridge.data.media.references import (
    AudioReference,
    ImageReference,
    MediaReference,
    VideoReference,
    decode,
    png,
)
from megatron.bridge.data.media.videos import decode_frames
from megatron.bridge.data.preview.collect import Preview, RankBatch, SplitPreview, TextSegment

if TYPE_CHECKING:
    from PIL import Image

TRAINED, CONTEXT, IMAGE = "bold green", "dim", "bold cyan"
BAR = 40  # characters of the longest bar
PICTURE_WIDTH = 240  # pixels
FRAMES = 4  # of a video
PLAYED_SECONDS = 30  # of a recording
PICTURE = "\ue001"  # of a private area: stands for a picture until the page is written
PAGE_WIDTH = 120  # characters
PART_LENGTH = 2000
"""Characters of a part of a sample that a console shows; more are left out of its middle."""
PAGE = """<!doctype html>
<html><head><meta charset="utf-8"><title>Data preview</title>
<style>body {{ color: #222; background: #fff; }} pre {{ white-space: pre-wrap; overflow-wrap: anywhere; }}</style>
</head><body><h1>Data preview</h1><pre>{code}</pre></body></html>
"""


def to_console(console: Console, preview: Preview, part_length: int | None = None) -> None:
    """Print a preview.

    Args:
        console: where to.
        preview: what was collected.
        part_length: characters of each part of a sample; more are left out of its middle. None shows all.
    """
    for split in preview.splits:
        console.print(_render_split(split, part_length))
    for corpus in preview.corpora:
        console.print(
            Text(corpus.name, style="bold underline"), *map(Text, corpus.lines()), "", sep="\n"
        )
    for row_number, text in enumerate(preview.texts, start=1):
        console.print(
            Text(f"beginning of row {row_number}", style="bold"),
            _sample_text(text, part_length),
            sep="\n",
        )
    if preview.first_batches:
        console.print(_render_batches(preview.first_batches))


def to_html(preview: Preview) -> str:
    """The preview as a page that needs no other file."""
    console = Console(record=True, width=PAGE_WIDTH, file=io.StringIO(), highlight=False)
    to_console(
        console, replace(preview, splits=[_with_pictures(split) for split in preview.splits])
    )
    page = console.export_html(code_format=PAGE, inline_styles=True)
    shown = (
        part.image
        for split in preview.splits
        for sample in split.samples
        for part in sample
        if part.image
    )
    return re.sub(PICTURE, lambda _: _media_html(next(shown)), page)


def _with_pictures(split: SplitPreview) -> SplitPreview:
    """The split with a mark for the picture or player in front of each image, video or recording."""
    samples = [
        [replace(part, text=PICTURE + part.text) if part.image else part for part in sample]
        for sample in split.samples
    ]
    return replace(split, samples=samples)


def _media_html(media: MediaReference) -> str:
    """The image, some frames of the video, or a player of the audio, as HTML, small enough for a page."""
    if isinstance(media, AudioReference):
        return _audio_html(media)
    pictures = [decode(media)] if isinstance(media, ImageReference) else _video_frames(media)
    return "".join(map(_image_html, pictures))


def _audio_html(audio: AudioReference) -> str:
    """A player of the first seconds, of one channel as the model hears it."""
    waveform = decode_audio(audio, audio.rate)[: PLAYED_SECONDS * audio.rate]
    data = base64.b64encode(wav_file(waveform, audio.rate)).decode()
    return (
        '<audio controls style="vertical-align: middle; height: 2em" '
        f'src="data:audio/wav;base64,{data}"></audio>'
    )


def _video_frames(video: VideoReference) -> list["Image.Image"]:
    from PIL import Image

    numbers = np.linspace(0, video.frames - 1, min(video.frames, FRAMES)).astype(int).tolist()
    return [
        Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in decode_frames(video, numbers)
    ]


def _image_html(picture: "Image.Image") -> str:
    picture.thumbnail((PICTURE_WIDTH, PICTURE_WIDTH))
    data = base64.b64encode(png(picture)).decode()
    return f'<img alt="" style="vertical-align: middle" src="data:image/png;base64,{data}">'


def _render_split(split: SplitPreview, part_length: int | None) -> ConsoleRenderable:
    lines: list[ConsoleRenderable] = [Text(split.name, style="bold underline")]
    lines += [Text(line) for line in summary(split)]
    lines.append(_render_histogram(split))
    for title, sample in zip(split.titles, split.samples, strict=True):
        lines += [Text(title, style="bold"), _sample_text(sample, part_length)]
    return Group(*lines, Text())


def summary(split: SplitPreview) -> Iterator[str]:
    """Counts, lengths and packing, one sentence each."""
    yield f"{split.report.records:,} records of {split.source}: {'; '.join(split.report.lines())}"
    if split.media:
        yield split.media
    yield f"length: mean {split.mean:.0f}, median {split.median:.0f}, longest {split.longest:,} tokens"
    fill = "" if split.fill is None else f", {split.fill:.2%} full"
    yield f"{split.rows:,} rows in an epoch{fill}"


def _render_histogram(split: SplitPreview) -> Table:
    table = Table(box=None, show_header=False)
    largest_count = max(count for _, count in split.histogram)
    for length, count in split.histogram:
        table.add_row(f"up to {length:,}", "#" * round(BAR * count / largest_count), f"{count:,}")
    return table


def _shortened(text: str, length: int | None) -> str:
    """``text``, without its middle if it is longer than ``length``."""
    if length is None or len(text) <= length:
        return text
    half = length // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"


def _sample_text(segments: list[TextSegment], part_length: int | None) -> Text:
    """The text of a sample. The part in the loss has a color, and brackets for consoles without colors."""
    shown = Text()
    for segment in segments:
        text = _shortened(segment.text, part_length)
        if segment.image is not None:
            shown.append(text, IMAGE)
        elif segment.trained:
            shown.append(f"\u27e6{text}\u27e7", TRAINED)
        else:
            shown.append(text, CONTEXT)
    trained = sum(segment.tokens for segment in segments if segment.trained)
    tokens = sum(segment.tokens for segment in segments)
    shown.append(
        f"\n({trained:,} of {tokens:,} tokens, those in \u27e6\u27e7, are in the loss)", "italic"
    )
    return shown


def _render_batches(batches: list[RankBatch]) -> Table:
    columns = ["data rank", "samples", "sequences", "tokens", "in the loss"]
    columns += [] if batches[0].images is None else ["of images"]
    table = Table(*columns, title="first microbatch of each data-parallel rank", box=None)
    for batch in batches:
        counts = (
            batch.sequences,
            batch.tokens,
            batch.trained,
            *([] if batch.images is None else [batch.images]),
        )
        table.add_row(
            str(batch.rank), ", ".join(map(str, batch.samples)), *(f"{count:,}" for count in counts)
        )
    return table
