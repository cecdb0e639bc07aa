# SPDX-License-Identifier: Apache-2.0
"""The public sources that the published configs were checked against.

``tests/families/published_sources.tsv`` has a line for each model and source: the hub id, the source as
``owner/repository:path`` or as a file of transformers, and the keys whose values the source confirms, or ``all``.
Keys are those of ``recipes/configs``, with dots between levels. A model without a line was written from memory.
"""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.bridge.recipes.sizes import TEXT_MODEL
from scripts.docs.generated import ROOT, GeneratedPart
from scripts.docs.recipe_configs import CONFIGS, IDENTITY

SOURCES = ROOT / "tests/families/published_sources.tsv"
PART = GeneratedPart(
    ROOT / "docs/models.md", "<!-- sources: make models -->\n", "<!-- end of sources -->\n"
)
FROM_MEMORY = "from memory"
NOT_COMPARED = {*IDENTITY, "use_cache", "dtype"}
"""Keys that say nothing of the function: names, special tokens, and how a run stores and caches."""
DISPUTED = {
    ("Qwen/Qwen1.5-MoE-A2.7B", "max_position_embeddings"): (
        "8192 is of the base model, 32768 of the chat model and its quantized copies"
    ),
    ("tencent/Hunyuan-7B-Instruct", "max_position_embeddings"): (
        "32768 or 262144 by public converters, which accept both; the rotary embedding does not depend on it"
    ),
}
"""(Model, key) -> what public sources say of a value in which they differ."""


@dataclass(frozen=True)
class SourceLine:
    """What one source says of one model."""

    model: str
    """The hub id."""
    source: str
    """``owner/repository:path``, or ``transformers VERSION configuration_NAME.py``."""
    keys: tuple[str, ...]
    """The keys whose stored values the source confirms; ``("all",)`` for all of them."""


def read_lines() -> list[SourceLine]:
    """Read the table of sources."""
    with SOURCES.open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return [SourceLine(row["model"], row["source"], tuple(row["keys"].split())) for row in rows]


def stored_models() -> dict[str, Path]:
    """Hub id -> stored config."""
    return {path.stem.replace("--", "/", 1): path for path in sorted(CONFIGS.glob("*.json"))}


def stored_values(config: Path) -> dict[str, Any]:
    """Return the values of ``config`` that make the function, by key with dots between levels."""
    values = flatten(json.loads(config.read_text()))
    return {key: value for key, value in values.items() if key.split(".")[-1] not in NOT_COMPARED}


def flatten(entries: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``entries`` without levels: ``{"a": {"b": 1}}`` is ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in entries.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def confirmed_keys(line: SourceLine, values: Mapping[str, Any]) -> set[str]:
    """The keys of ``values`` that ``line`` confirms."""
    return set(values) if line.keys == ("all",) else set(line.keys)


def checked_models() -> set[str]:
    """Hub ids with at least one source; a text model has that of the published model that it is a part of."""
    published = {line.model for line in read_lines()}
    return published | {
        model for model in stored_models() if model.removesuffix(TEXT_MODEL) in published
    }


def table() -> str:
    """A Markdown table with the sources of each stored config."""
    lines = ["| published config | checked against | keys confirmed |", "|---|---|---|"]
    by_model: dict[str, list[SourceLine]] = {}
    for line in read_lines():
        by_model.setdefault(line.model, []).append(line)
    for model, config in stored_models().items():
        source_lines = by_model.get(model.removesuffix(TEXT_MODEL), [])
        lines.append(_row(model, source_lines, stored_values(config)))
    return "\n".join(lines) + "\n"


def _row(model: str, source_lines: list[SourceLine], values: Mapping[str, Any]) -> str:
    if not source_lines:
        return f"| {model} | {FROM_MEMORY} | none{_describe_disputes(model)} |"
    sources = ", ".join(f"`{line.source}`" for line in source_lines)
    confirmed: set[str] = set()
    for line in source_lines:
        confirmed |= confirmed_keys(line, values)
    unconfirmed = sorted(set(values) - confirmed)
    if not unconfirmed:
        return f"| {model} | {sources} | all {len(values)} |"
    count = f"{len(confirmed)} of {len(values)}"
    return f"| {model} | {sources} | {count}{_describe_disputes(model)} |"


def _describe_disputes(model: str) -> str:
    disputes = [f"`{key}`: {what}" for (name, key), what in DISPUTED.items() if name == model]
    return "".join(f"; {dispute}" for dispute in disputes)
