# SPDX-License-Identifier: Apache-2.0
"""``README.md`` of an exported model: what it comes from, what was done to it, and what its source says of itself.

A model that was only converted is its source, bit for bit, and keeps the source's card as it is. Otherwise the
card says first what was done; the source's text follows, and its metadata, such as licence and languages, stays.
Scores that the source claims there are left out: they are not this model's.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.loss_curves import LOSS, read_metrics

NAME = "README.md"
TAG = "megatron-bridge"

_METADATA = re.compile(r"\A---\r?\n(.*?)\r?\n---\r?\n", re.DOTALL)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_IN_CACHE = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
_OF_THE_SOURCE_ONLY = ("model-index", "base_model_relation", "new_version")
_LOSSES = {"train": "training", "validation": "validation", "test": "test"}


@dataclass(frozen=True)
class History:
    """What became of the source's weights."""

    steps: int = 0  # of training; 0 if there was none
    from_scratch: bool = False  # whether training began with random weights, not with the source's
    adapters: str = ""  # what was merged into the weights, such as ``LoRA of rank 32``
    note: str = ""  # anything else that was done, as a sentence
    # the last of each kind (train, validation, test) that was written down up to ``steps``
    losses: Mapping[str, float] = field(default_factory=dict[str, float])
    run_files: tuple[
        Path, ...
    ] = ()  # config, report and curves of the run, which go with the model
    # min_pixels and max_pixels of images, fps and max_frames of videos, where the run set them
    image_limits: Mapping[str, float] = field(default_factory=dict[str, float])

    chat_template: str | None = None
    """Template that the weights were trained with instead of the source's."""

    @property
    def changed(self) -> bool:
        """Whether the weights are known not to be the source's."""
        return bool(self.steps or self.adapters or self.note)


def compose(title: str, source: str | None, source_card: str | None, history: History) -> str:
    """The card's text.

    Args:
        title: name of the exported model.
        source: name of the model that it is like; None without one.
        source_card: that model's card, if it has one.
    """
    if source_card is not None and not history.changed:
        return source_card
    source_metadata, text = _split_metadata(source_card or "")
    metadata = {
        key: value for key, value in source_metadata.items() if key not in _OF_THE_SOURCE_ONLY
    }
    metadata.setdefault("library_name", "transformers")
    if source is not None and _HUB_ID.fullmatch(source) and not history.from_scratch:
        metadata["base_model"] = source
    metadata["tags"] = list(dict.fromkeys([*_as_list(source_metadata.get("tags")), TAG]))
    lines = [
        "---",
        yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True).rstrip(),
        "---",
        "",
    ]
    lines += [f"# {title}", "", *_card_lines(source, history)]
    if text.strip():
        lines += ["", f"## The card of {source or 'the source'}", "", text.strip()]
    return "\n".join(lines) + "\n"


def _card_lines(source: str | None, history: History) -> Iterator[str]:
    if source is not None:
        yield (
            f"Config and tokenizer of {source}."
            if history.from_scratch
            else f"Base model: {source}."
        )
    if history.steps:
        begun = "from random weights" if history.from_scratch else "from the base model's weights"
        yield f"Trained for {history.steps:,} steps with Megatron-Core, {begun}."
    if history.adapters:
        yield f"Adapters were merged into the weights: {history.adapters}."
    if history.note:
        yield history.note
    done = "Its weights were" if history.changed else "Its weights are those of the Megatron model,"
    yield f"{done} exported to Hugging Face format with Megatron Bridge."
    if history.losses:
        yield "\n| data | loss |\n|---|---|"
        yield from (f"| {_LOSSES[kind]} | {loss:.4f} |" for kind, loss in history.losses.items())


def last_losses(folder: Path, steps: int) -> dict[str, float]:
    """The last losses that a run wrote down up to a step; nothing where there is no record, or a damaged one."""
    try:
        rows = read_metrics(folder)
    except UserError:
        return {}
    return {
        row["kind"]: row[LOSS]
        for row in rows
        if row["step"] <= steps and row["kind"] in _LOSSES and LOSS in row
    }


def public_name(model: str) -> str:
    """What to call a model: its hub id, also of a copy in the hub's cache, or the name of its directory."""
    cached = _IN_CACHE.search(model)
    if cached:
        return f"{cached[1]}/{cached[2]}"
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() or not _HUB_ID.fullmatch(model) else model


def _split_metadata(card: str) -> tuple[dict[str, Any], str]:
    """Metadata and text; what is not valid metadata is text."""
    header = _METADATA.match(card)
    try:
        metadata = yaml.safe_load(header[1]) if header else None
    except yaml.YAMLError:
        metadata = None
    if header is None or not isinstance(metadata, dict):
        return {}, card
    return cast(dict[str, Any], metadata), card[header.end() :]


def _as_list(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else [] if value is None else [value]
