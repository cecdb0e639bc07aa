# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge port``: draft the bridge of an architecture that is not registered."""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from megatron.bridge.cli.support.text_format import say
from megatron.bridge.models.hf_pretrained import hub
from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.errors import UserError, first_problems

_FILES = yaml_text.tables_beside(__file__)


def run(args: argparse.Namespace) -> int:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # numbers are compared in float32 on the CPU
    config = _config(args.model)
    kind = config.model_type
    names = (f"{kind}_bridge.py", f"test_{kind}.py", f"{kind}_recipe.py")
    paths = [args.output / name for name in names] if args.output else []
    if there := [str(path) for path in paths if path.exists()]:
        raise UserError(f"{there[0]} exists: choose another --output, or move it away")
    from megatron.bridge.testing import draft

    with tempfile.TemporaryDirectory() as folder:
        found, row, problems = draft.best(config, Path(folder))
    say("\n".join((*found.report, *([first_problems(problems)] if problems else []))))
    experts = ("ep2",) if any("experts" in key for key in row.config) else ()
    about = {"kind": kind, "name": found.architecture, "model": args.model, "tiny": row.config}
    about |= {"layouts": ("tp2", "pp2", *experts), "config": json.loads(config.to_json_string())}
    for path, text in zip(
        paths, (found.source, *(text.format(**about) for text in _FILES.values())), strict=False
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        say(f"written: {path}")
    passed = "the draft passes on one process: logits, gradients, bytes, config"
    passed += f"; prove it under layouts: python -m pytest {paths[1]}" if paths else ""
    say(
        "the draft does not pass yet: docs/adding-a-family.md describes the next steps"
        if problems
        else passed
    )
    return 1 if problems else 0


def _config(name: str) -> Any:
    if not Path(name).is_file():
        hub.local_folder(name)  # before anything slow is imported
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.hf_pretrained import PreTrainedCausalLM

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "config.json"
        if is_file := Path(name).is_file():
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
