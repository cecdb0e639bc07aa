# SPDX-License-Identifier: Apache-2.0
"""From rows of well-known datasets to conversations."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Row = Mapping[str, Any]
Record = dict[str, Any]


class Maker(NamedTuple):
    """A dataset on the hub and how its rows are read."""

    dataset: str
    subset: str | None
    record: Callable[[Row], Record]


def conversation(images: list[Any], question: str, answer: str) -> Record:
    """One question about images, and its answer."""
    parts = [{"type": "image", "image": image} for image in images]
    content = [*parts, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def rdr(row: Row) -> Record:
    """Pictures of things with a description."""
    return conversation([row["image"]], "Describe this image.", row["text"])


def medpix(row: Row) -> Record:
    """Medical images with a question and an answer."""
    return conversation([row["image_id"]], row["question"], row["answer"])


def cord_v2(row: Row) -> Record:
    """Receipts; the answer is what they say, as tagged text."""
    truth = json.loads(row["ground_truth"])
    parsed = truth.get("gt_parse") or truth["gt_parses"][0]
    return conversation([row["image"]], "Describe this image.", tagged(parsed))


def raven(row: Row) -> Record:
    """Puzzles of several pictures in a row."""
    first = row["texts"][0]
    return conversation(list(row["images"]), first["user"], first["assistant"])


def tagged(value: Any) -> str:
    """Nested values as text: keys become tags, entries of a list are separated by ``<sep/>``.

    Example:
        >>> tagged({"menu": [{"nm": "tea"}, {"nm": "pie"}]})
        '<s_menu><s_nm>tea</s_nm><sep/><s_nm>pie</s_nm></s_menu>'
    """
    if isinstance(value, Mapping):
        return "".join(f"<s_{key}>{tagged(value[key])}</s_{key}>" for key in sorted(value, reverse=True))
    return "<sep/>".join(map(tagged, value)) if isinstance(value, list) else str(value)


MAKERS: Mapping[str, Maker] = {
    "rdr": Maker("quintend/rdr-items", None, rdr),
    "cord_v2": Maker("naver-clova-ix/cord-v2", None, cord_v2),
    "medpix": Maker("mmoukouba/MedPix-VQA", None, medpix),
    "raven": Maker("HuggingFaceM4/the_cauldron", "raven", raven),
}
"""Short name -> its maker."""
