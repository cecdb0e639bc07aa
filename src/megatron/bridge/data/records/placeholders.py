# SPDX-License-Identifier: Apache-2.0
"""The placeholders of images in a rendered conversation, replaced by the text of each image."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from megatron.bridge.data.media.processing import MediaProcessor
from megatron.bridge.data.media.references import ImageReference
from megatron.bridge.data.records.chat_template import RenderedChat
from megatron.bridge.utils.errors import UserError


def expand(
    rendered: RenderedChat, images: Sequence[ImageReference], media: MediaProcessor, where: str
) -> RenderedChat:
    """``rendered`` with the text of each image in the place of its placeholder; spans move along.

    Raises:
        UserError: the text has another number of placeholders than the record has images.
    """
    pieces = rendered.text.split(media.placeholder)
    if len(pieces) - 1 != len(images):
        raise UserError(
            f"{where}: the rendered conversation has {len(pieces) - 1} placeholders {media.placeholder} for "
            f"{len(images)} images: the chat template must write one for each image, and no text may contain it"
        )
    if not images:
        return rendered
    texts = [media.text(image) for image in images]
    joined = [part for pair in zip(pieces, [*texts, ""], strict=True) for part in pair]
    size = len(media.placeholder)
    ends = [end + size * number for number, end in enumerate(accumulate(map(len, pieces[:-1])), start=1)]
    shifts = [0, *accumulate(len(text) - size for text in texts)]

    def moved(place: int) -> int:
        return place + shifts[bisect_right(ends, place)]

    spans = [(moved(first), moved(last)) for first, last in rendered.spans]
    return replace(rendered, text="".join(joined), spans=spans, images=tuple(images))
