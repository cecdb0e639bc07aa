# SPDX-License-Identifier: Apache-2.0
"""Write what follows from the code in each examples/models/<family>/README.md: ``make examples``.

That is all between a line ``<!-- make examples: [RECIPE] MODEL -->`` and the end mark: architectures, models on
the hub, recipes, and the commands for that model. What is particular to a family is written by hand, above it.
"""

import json
import math
import re
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.bridge.recipes.catalog import Recipe

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "models"
START, END = re.compile(r"<!-- make examples: (?:(\w+) )?(\S+/\S+) -->\n"), "<!-- end of make examples -->\n"
# families that train a model of another one's architecture: the owner on the hub -> family
OWNERS = {"HuggingFaceTB": "smollm", "nvidia": "nemotron"}
# packages of recipes that stand beside a family of models under another name
RECIPES_OF = {"deepseek": ("deepseek", "moonshot")}


def pages() -> list[Path]:
    """The README.md of each family."""
    return sorted(FOLDER.glob("*/README.md"))


def written(page: Path) -> str:
    """The text of ``page``, its made part made anew."""
    text = page.read_text()
    mark = START.search(text)
    assert mark, f"{page} has no line <!-- make examples: [RECIPE] MODEL -->"
    made = "\n".join(_sections(page.parent.name, mark[1], mark[2]))
    return text[: mark.end()] + made + "\n" + END + text.partition(END)[2]


def _sections(family: str, stem: str | None, model: str) -> list[str]:
    return [*_architectures(family), *_published(family), *_here(family), *_there(stem, model), *_recipes(family)]


def _architectures(family: str) -> list[str]:
    """What each architecture is, in the words of its bridge, and what it is tested under."""
    table = runpy.run_path(str(ROOT / "scripts/docs/supported_models.py"))
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion.model_bridge import _REGISTRY

    layouts = table["_layouts"]()
    lines = ["## Architectures", "", "| architecture | what it is | layouts tested |", "|---|---|---|"]
    for name in AutoBridge.list_supported_models():
        module = _REGISTRY[name].bridge.__module__
        if module.split(".")[3] == family:
            about = (sys.modules[module].__doc__ or "").strip().rstrip(".")
            lines.append(f"| `{name}` | {about} | {' '.join(layouts.get(name, ()))} |")
    return [*lines, ""]


def _published(family: str) -> list[str]:
    from megatron.bridge.models.conversion.model_bridge import _REGISTRY

    found = []
    for path in sorted((ROOT / "tests/families/published").glob("*.json")):
        owner, _, name = path.stem.partition("--")
        (architecture,) = json.loads(path.read_text())["architectures"]
        home = OWNERS.get(owner) or _REGISTRY[architecture].bridge.__module__.split(".")[3]
        if home == family and not name.endswith("-text"):  # of that one only the text part is checked
            found.append(f"`{owner}/{name}`")
    return ["## On the hub", "", f"Published configs that are checked: {', '.join(found)}.", ""]


def _here(family: str) -> list[str]:
    """The circle of each toy."""
    lines = [
        "## Here, at toy size",
        "",
        "Convert, train two steps, export, load with transformers, in seconds:",
        "",
    ]
    commands = []
    for toy in sorted((FOLDER / family).glob("*.json")):
        experts = any("experts" in key for key in json.loads(toy.read_text()))
        layout = "--ep 2" if experts else "--tp 2"
        path = toy.relative_to(ROOT)
        commands.append(f"torchrun --nproc-per-node=2 examples/models/toy_circle.py {path} {layout}")
    return [*lines, "```bash", *commands, "```", ""]


def _there(stem: str | None, model: str) -> list[str]:
    """The commands for a published model, from its conversion to the trained one in Hugging Face format."""
    from megatron.bridge.recipes.catalog import find

    name = stem or model.rpartition("/")[2].lower()
    stored, run = f"checkpoints/{name}", f"runs/{name}"
    lines = [
        f"megatron-bridge convert --hf-model {model} --megatron-path {stored}",
        f"python examples/conversion/compare_models.py --hf-model {model} --megatron-path {stored}",
    ]
    if stem:
        pretrain, tune = find(f"{stem}_pretrain_config"), find(f"{stem}_finetune_config")
        lines += [
            f"{_start(pretrain)} --data corpus/text checkpoint.save={run}",
            f"{_start(tune)} --mode lora --data chats checkpoint.pretrained_checkpoint={stored} "
            f"checkpoint.save={run}-lora",
            f"megatron-bridge adapter merge --hf-model {model} --adapter {run}-lora --hf-path {name}-lora",
        ]
    lines.append(f"megatron-bridge export --hf-model {model} --megatron-path {run} --hf-path {name}")
    title = f"## {model.rpartition('/')[2]}, from the hub and back"
    told = "Convert and compare the logits; pretrain; LoRA, merged; export." if stem else _WITHOUT_RECIPE
    return [title, "", told, "", "```bash", *lines, "```", ""]


_WITHOUT_RECIPE = """\
There is no recipe for this family. Any other one trains it, with `--hf-model` on the command line or `hf_model=`
in Python; choose the layout. Convert and compare the logits; export:"""


def _start(recipe: "Recipe") -> str:
    """The launcher, on as many machines of 8 GPUs as the recipe is made for."""
    machines = math.ceil(recipe.gpus / 8)
    many = f"--nnodes={machines} " if machines > 1 else ""
    start = f"torchrun {many}--nproc-per-node={min(recipe.gpus, 8)} scripts/training/run_recipe.py"
    return f"{start} --recipe {recipe.name}"


def _recipes(family: str) -> list[str]:
    from megatron.bridge.recipes.catalog import catalog

    packages = RECIPES_OF.get(family, (family,))
    own = [recipe for recipe in catalog().values() if recipe.module.split(".")[3] in packages]
    if not own:
        return []
    lines = ["## Recipes", "", "| recipe | trains | GPUs | layout |", "|---|---|---|---|"]
    for recipe in own:
        gpus = f"{recipe.gpus} x {recipe.gpu_kind}"
        lines.append(f"| `{recipe.name}` | {recipe.what} | {gpus} | {recipe.why} |")
    return [*lines, "", "How much memory each takes: [recipes](../../../docs/recipes.md).", ""]


def main() -> None:
    """Write all pages."""
    sys.path.insert(0, str(ROOT))
    for page in pages():
        page.write_text(written(page))


if __name__ == "__main__":
    main()
