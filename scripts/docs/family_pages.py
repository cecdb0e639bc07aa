# SPDX-License-Identifier: Apache-2.0
"""Write the generated part of each examples/models/<family>/README.md: ``make examples``.

It follows a line ``<!-- make examples: RECIPE MODEL -->`` and lists architectures, models on the hub, recipes,
and the commands for MODEL. The text above that line is written by hand.
"""

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.docs.generated import ROOT, GeneratedPart
from scripts.docs.supported_models import tested_layouts, what_it_is

if TYPE_CHECKING:
    from megatron.bridge.recipes.recipe import Recipe

FOLDER = ROOT / "examples" / "models"
START, END = (
    re.compile(r"<!-- make examples: (\w+) (\S+/\S+) -->\n"),
    "<!-- end of make examples -->\n",
)
# owner on the hub -> family, where a family uses the architecture of another one
OWNERS = {"HuggingFaceTB": "smollm", "nvidia": "nemotron"}
# how names of a family's recipes in other packages start, where it is not the name of the family
RECIPES_OF = {
    "deepseek": ("kimi_k2", "moonlight"),
    "kimi": ("kimi_linear",),
    "mistral": ("mistral", "voxtral"),
}


def pages() -> list[Path]:
    """The README.md of each family."""
    return sorted(FOLDER.glob("*/README.md"))


def generated(page: Path) -> tuple[GeneratedPart, str]:
    """The generated part of ``page``, and what it should contain."""
    mark = START.search(page.read_text())
    assert mark, f"{page} has no line <!-- make examples: RECIPE MODEL -->"
    family, (stem, model) = page.parent.name, mark.groups()
    sections = [
        _architectures(family),
        _published(family),
        _toys(family),
        _commands(stem, model),
        _recipes(family),
    ]
    lines = [line for section in sections for line in section]
    return GeneratedPart(page, mark[0], END), "\n".join(lines) + "\n"


def _architectures(family: str) -> list[str]:
    """Each architecture with the docstring of its bridge, and the layouts that it is tested under."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion.model_bridge import _REGISTRY

    layouts = tested_layouts()
    lines = [
        "## Architectures",
        "",
        "| architecture | what it is | layouts tested |",
        "|---|---|---|",
    ]
    for name in AutoBridge.list_supported_models():
        module = _REGISTRY[name].bridge.__module__
        if module.split(".")[3] == family:
            lines.append(f"| `{name}` | {what_it_is(name)} | {' '.join(layouts.get(name, ()))} |")
    return [*lines, ""]


def _published(family: str) -> list[str]:
    from megatron.bridge.models.conversion.model_bridge import _REGISTRY, registered_name

    found = []
    for path in sorted((ROOT / "tests/families/published").glob("*.json")):
        owner, _, name = path.stem.partition("--")
        (architecture,) = json.loads(path.read_text())["architectures"]
        home = (
            OWNERS.get(owner)
            or _REGISTRY[registered_name(architecture)].bridge.__module__.split(".")[3]
        )
        if home == family and not name.endswith(
            "-text"
        ):  # only the text part of this model is checked
            found.append(f"`{owner}/{name}`")
    return ["## On the hub", "", f"Tests check these published configs: {', '.join(found)}.", ""]


def _toys(family: str) -> list[str]:
    """The round trip of each toy model."""
    lines = [
        "## On this machine, at toy size",
        "",
        "Convert, train two steps, export, and load with transformers, in seconds:",
        "",
    ]
    commands = []
    for toy in sorted((FOLDER / family).glob("*.json")):
        experts = any("experts" in key for key in json.loads(toy.read_text()))
        layout = "--ep 2" if experts else "--tp 2"
        path = toy.relative_to(ROOT)
        commands.append(
            f"torchrun --nproc-per-node=2 examples/models/toy_roundtrip.py {path} {layout}"
        )
    return [*lines, "```bash", *commands, "```", ""]


def _commands(stem: str, model: str) -> list[str]:
    """The commands that convert, train and export a published model."""
    from megatron.bridge.recipes.catalog import find

    stored, run = f"checkpoints/{stem}", f"runs/{stem}"
    pretrain, tune = find(f"{stem}_pretrain_config"), find(f"{stem}_finetune_config")
    lines = [
        f"megatron-bridge convert --hf-model {model} --megatron-path {stored}",
        f"python examples/conversion/compare_models.py --hf-model {model} --megatron-path {stored}",
        f"{_start(pretrain)} --data corpus/text checkpoint.save={run}",
        f"{_start(tune)} --mode lora --data chats checkpoint.pretrained_checkpoint={stored} checkpoint.save={run}-lora",
        f"megatron-bridge adapter merge --hf-model {model} --adapter {run}-lora --hf-path {stem}-lora",
        f"megatron-bridge export --hf-model {model} --megatron-path {run} --hf-path {stem}",
    ]
    title = f"## {model.rpartition('/')[2]}, from the hub and back"
    about = "Convert it and compare the logits, pretrain, train and merge a LoRA adapter, export:"
    return [title, "", about, "", "```bash", *lines, "```", ""]


def _start(recipe: "Recipe") -> str:
    """The launcher, on as many nodes of 8 GPUs as the recipe is made for."""
    machines = math.ceil(recipe.gpus / 8)
    many = f"--nnodes={machines} " if machines > 1 else ""
    start = f"torchrun {many}--nproc-per-node={min(recipe.gpus, 8)} -m megatron.bridge train"
    return f"{start} --recipe {recipe.name}"


def _recipes(family: str) -> list[str]:
    from megatron.bridge.recipes.catalog import catalog

    starts = RECIPES_OF.get(family, (family,))
    own = [
        recipe
        for recipe in catalog().values()
        if recipe.module.split(".")[3] == family or recipe.name.startswith(starts)
    ]
    lines = ["## Recipes", "", "| recipe | training | GPUs | layout |", "|---|---|---|---|"]
    for recipe in own:
        gpus = f"{recipe.gpus} x {recipe.gpu_kind}"
        lines.append(f"| `{recipe.name}` | {recipe.what} | {gpus} | {recipe.layout} |")
    return [
        *lines,
        "",
        "[All recipes](../../../docs/recipes.md) lists the memory that each of them needs.",
        "",
    ]


def main() -> None:
    """Write all pages."""
    for page in pages():
        part, body = generated(page)
        part.write(body)


if __name__ == "__main__":
    main()
