# SPDX-License-Identifier: Apache-2.0
"""Write the table of docs/models.md from the registry of bridges: ``make models``."""

import json
import sys

from scripts.docs import config_sources
from scripts.docs.generated import ROOT, GeneratedPart, table_of

PART = table_of("models.md", "models")
DEVIATIONS = GeneratedPart(
    PART.page, "<!-- deviations: make models -->\n", "<!-- end of deviations -->\n"
)


def table() -> str:
    """A Markdown table with each architecture, its models, and what is tested."""
    from megatron.bridge import AutoBridge

    published, layouts = _published(), tested_layouts()
    lines = [
        "| architecture | models | layouts tested | published configs checked |",
        "|---|---|---|---|",
    ]
    for name in AutoBridge.list_supported_models():
        cells = (
            f"`{name}`",
            what_it_is(name),
            " ".join(layouts.get(name, ())),
            ", ".join(published.get(name, ())),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def deviations() -> str:
    """A Markdown table of what differs from transformers."""
    from megatron.bridge.models.conversion import deviations as registry

    lines = ["| models | here | in transformers |", "|---|---|---|"]
    for one in registry.DEVIATIONS:
        here = f"in training, {one.here}" if one.in_training_only else one.here
        lines.append(f"| {one.models} | {here} | {one.in_transformers} |")
    return "\n".join(lines) + "\n"


def what_it_is(architecture: str) -> str:
    """The first paragraph of the docstring of its bridge, or of that one's module, in one line: a cell of a table."""
    from megatron.bridge.models.conversion.model_bridge import _REGISTRY

    bridge = _REGISTRY[architecture].bridge
    own = (
        vars(kind).get("__doc__") for kind in bridge.__mro__ if kind.__module__ == bridge.__module__
    )
    docstring = next(filter(None, own), sys.modules[bridge.__module__].__doc__ or "")
    return " ".join(docstring.strip().partition("\n\n")[0].split()).rstrip(".")


def _published() -> dict[str, list[str]]:
    """Architecture -> published models whose config.json is in the tests, with a star if written from memory."""
    from megatron.bridge.models.conversion.model_bridge import registered_name

    checked = config_sources.checked_models()
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests" / "families").glob("published*/*.json")):
        (architecture,) = json.loads(path.read_text())["architectures"]
        hub_id = path.stem.removesuffix("-text").replace("--", "/", 1)
        star = "" if hub_id in checked else "\\*"
        name = path.stem.partition("--")[2] + star
        found.setdefault(registered_name(architecture), []).append(name)
    return found


def tested_layouts() -> dict[str, list[str]]:
    """Architecture -> parallel layouts that its tests run under, besides one process."""
    from tests.families.rows import ROWS
    from tests.families.vision import rows as vision
    from tests.families.vision.harness import LAYOUTS

    found: dict[str, set[str]] = {}
    for row in (*ROWS.values(), *vision.ROWS.values()):
        found.setdefault(row.model, set()).update(row.layouts, row.four, getattr(row, "slow", ()))
    return {name: [layout for layout in LAYOUTS if layout in used] for name, used in found.items()}


if __name__ == "__main__":
    PART.write(table())
    DEVIATIONS.write(deviations())
    config_sources.PART.write(config_sources.table())
