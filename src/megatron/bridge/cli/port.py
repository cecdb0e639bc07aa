# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge port``: draft the bridge of an architecture that is not registered."""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.bridge.cli.support.output_files import OutputFile
from megatron.bridge.cli.support.parser import POSITIONAL, Parser, location
from megatron.bridge.cli.support.text_format import say
from megatron.bridge.models.hf_pretrained import hub
from megatron.bridge.utils.errors import UserError, first_problems

if TYPE_CHECKING:
    from megatron.bridge.testing import Row

DESCRIPTION = (
    "Draft the bridge of an architecture that is not supported: find the nearest family, list the "
    "keys and tensors that it does not map and the code that reads them elsewhere, and test a tiny "
    "model. No weights are read. The exit code is 0 if the draft passes on one process."
)


def add_arguments(parser: Parser) -> None:
    parser.description = DESCRIPTION
    parser.add_hidden_names({"--hf-model": POSITIONAL})
    parser.add_argument(
        "model",
        type=location,
        metavar="MODEL_OR_CONFIG",
        help="model directory, hub id, or a config.json",
    )
    parser.add_argument(
        "--output",
        type=OutputFile,
        metavar="DIR",
        help="write the draft, its test and a recipe there",
    )


def run(args: argparse.Namespace) -> int:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # numbers are compared in float32 on the CPU
    config = _read_config(args.model)
    kind = config.model_type
    bridge_file = f"{kind}_bridge.py"
    test_file = f"test_{kind}.py"
    recipe_file = f"{kind}_recipe.py"
    if args.output is not None:
        _refuse_existing_files(args.output, [bridge_file, test_file, recipe_file])
    from megatron.bridge.testing import draft

    with tempfile.TemporaryDirectory() as folder:
        best_draft, row, problems = draft.best(config, Path(folder))
    say("\n".join(best_draft.report))
    if problems:
        say(first_problems(problems))
    if args.output is not None:
        texts = {
            bridge_file: best_draft.source,
            test_file: test_source(kind, best_draft.architecture, row),
            recipe_file: recipe_source(kind, args.model, json.loads(config.to_json_string())),
        }
        _write_files(args.output, texts)
    if problems:
        say("the draft does not pass yet: docs/adding-a-family.md describes the next steps")
        return 1
    passed = "the draft passes on one process: logits, gradients, bytes, config"
    if args.output is not None:
        passed += f"; prove it under layouts: python -m pytest {args.output / test_file}"
    say(passed)
    return 0


def _refuse_existing_files(folder: Path, names: list[str]) -> None:
    for name in names:
        if (folder / name).exists():
            raise UserError(f"{folder / name} exists: choose another --output, or move it away")


def _write_files(folder: Path, texts: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
        say(f"written: {folder / name}")


def test_source(kind: str, architecture: str, row: "Row") -> str:
    """Return the file that proves a drafted bridge against transformers.

    Args:
        kind: ``model_type`` of the config, with which the files are named.
        architecture: Hugging Face name of the model class.
        row: Tiny model that the draft was tried with.
    """
    has_experts = any("experts" in key for key in row.config)
    layouts = ("tp2", "pp2", "ep2") if has_experts else ("tp2", "pp2")
    return f"""\
# SPDX-License-Identifier: Apache-2.0
import {kind}_bridge  # noqa: F401 - registers itself

from megatron.bridge.testing import Row, check_family

ROW = Row("{kind}", "{architecture}", {row.config}, layouts={layouts})


def test_family():
    check_family(ROW)
"""


def recipe_source(kind: str, model: str, config: dict[str, Any]) -> str:
    """Return the file with recipes for a drafted bridge.

    Args:
        kind: ``model_type`` of the config, with which the files are named.
        model: Directory or hub id of the model.
        config: Hugging Face config of the model.
    """
    return f"""\
# SPDX-License-Identifier: Apache-2.0
import {kind}_bridge  # noqa: F401 - registers itself

from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.sizes import Size

SIZE = Size({model!r}, {config}, published=False)
{kind}_pretrain_config = pretrain_recipe(
    SIZE,
    what="{kind} pretraining",
    seq_length=2048,
    global_batch_size=64,
    lr=3e-4,
    min_lr=3e-5,
)
{kind}_finetune_config = finetune_recipe(SIZE, what="{kind} full fine-tuning")
"""


def _read_config(name: str) -> Any:
    """Return the Hugging Face config of a model directory, a hub id or a ``config.json``."""
    is_file = Path(name).is_file()
    if not is_file:
        hub.local_folder(name)  # before anything slow is imported
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.hf_pretrained import PreTrainedCausalLM

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "config.json"
        if is_file:
            copy.write_bytes(Path(name).read_bytes())
        try:
            config = PreTrainedCausalLM(folder if is_file else name).config
        except UserError as error:
            raise UserError(str(error).replace(str(copy), name)) from error
    if AutoBridge.supports(config):
        raise UserError(
            f"{config.architectures[0]} is supported: AutoBridge.from_hf_pretrained({name!r}) converts it"
        )
    return config
