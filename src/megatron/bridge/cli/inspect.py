# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge inspect``: what a checkpoint holds, read from its headers."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from megatron.bridge.cli import words

LAYOUT = ("tensor", "pipeline", "context", "expert")
_MEGATRON = ("latest_checkpointed_iteration.txt", "metadata.json")
_WIDTH = 200  # of what is not a terminal: names stay on one line


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``inspect``."""
    parser = subparsers.add_parser(
        "inspect",
        help="what a Hugging Face or Megatron checkpoint holds",
        description="Parameters, dtypes, files, layout and iteration of a checkpoint in either format. "
        "Only headers are read.",
    )
    parser.add_argument("path", type=Path, metavar="DIR", help="Hugging Face model, or Megatron checkpoint")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str

    @property
    def numbers(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds.

    Attributes:
        format: ``Hugging Face`` or ``Megatron``.
        facts: what there is to say of the whole, by title.
        tensors: weights; optimizer state and the like are counted in ``facts`` only.
        bytes: size of all files.
        files: how many files hold tensors.
    """

    format: str
    facts: dict[str, str]
    tensors: tuple[Stored, ...]
    bytes: int
    files: int


def read(path: Path) -> Contents:
    """The contents of a checkpoint in either format.

    Raises:
        UserError: neither format, or a damaged checkpoint.
    """
    from megatron.bridge.checkpoint import layout
    from megatron.bridge.utils.errors import UserError

    if not path.exists():
        raise UserError(f"{path} does not exist: give the directory of a model or of a checkpoint")
    if (path / "config.json").is_file():
        return _hugging_face(path)
    if layout.iteration_of(path) is None and not any((path / name).is_file() for name in _MEGATRON):
        raise UserError(
            f"{path} is no checkpoint: a Hugging Face model has a config.json, a Megatron one a {layout.TRACKER}"
        )
    return _megatron(path)


def _hugging_face(path: Path) -> Contents:
    from megatron.bridge.models.hf_pretrained import PreTrainedCausalLM

    pretrained = PreTrainedCausalLM(path)
    config = pretrained.raw_config
    tensors = tuple(
        Stored(entry.name, entry.shape, str(entry.dtype).removeprefix("torch."), entry.file.name)
        for entry in pretrained.state.entries.values()
    )
    facts = {
        "architecture": ", ".join(config.get("architectures") or ("not named",)),
        "dtype in config.json": str(config.get("dtype") or config.get("torch_dtype")),
        "layers": str(config.get("num_hidden_layers")),
        "hidden size": str(config.get("hidden_size")),
        "vocabulary": str(config.get("vocab_size")),
    }
    return Contents("Hugging Face", facts, tensors, _size(path), len({tensor.file for tensor in tensors}))


def _megatron(path: Path) -> Contents:
    from megatron.bridge.checkpoint import contents, layout, model_io

    directory = layout.resolve(path)
    found = contents.tensors(directory)
    files = _files_by_tensor(directory)
    weights = tuple(
        Stored(tensor.name, tensor.shape, str(tensor.dtype).removeprefix("torch."), _named(files[tensor.name]))
        for tensor in found.values()
        if contents.is_weight(tensor.name)
    )
    published = _listed(layout.published_iterations(directory.parent))
    facts = {
        "iteration": f"{layout.iteration_of(directory)} (published: {published})",
        **_facts_of_model(directory),
        "optimizer state": "yes" if any(name.startswith("optimizer.") for name in found) else "no",
        "tokenizer": "yes" if model_io.tokenizer_dir(directory) else "no",
    }
    return Contents("Megatron", facts, weights, _size(directory), len(list(directory.glob("*.distcp"))))


def _facts_of_model(directory: Path) -> dict[str, str]:
    """What the run's config tells; other programs write none, Megatron-LM for one."""
    from megatron.bridge.checkpoint import layout, model_io

    if not (directory / layout.RUN_CONFIG).is_file():
        return {"model": f"unknown, there is no {layout.RUN_CONFIG}"}
    model = model_io.read_run_config(directory)["model"]
    return {
        "provider": str(model.get("_target_")),
        "layers": str(model.get("num_layers")),
        "hidden size": str(model.get("hidden_size")),
        "vocabulary": str(model.get("vocab_size")),
        "layout of the run": _layout(model),
    }


def _files_by_tensor(directory: Path) -> dict[str, list[str]]:
    """Which files hold a part of each tensor."""
    from megatron.bridge.checkpoint import distributed

    files: dict[str, set[str]] = {}
    for index, place in distributed.check_files(directory).storage_data.items():
        files.setdefault(index.fqn, set()).add(place.relative_path)
    return {name: sorted(found) for name, found in files.items()}


def _named(files: list[str]) -> str:
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


def _layout(model: dict[str, Any]) -> str:
    sizes = (
        f"{kind} {model.get(f'{kind}_model_parallel_size', model.get(f'{kind}_parallel_size', 1))}"
        for kind in LAYOUT
    )
    return " x ".join(sizes)


def _listed(iterations: list[int]) -> str:
    return ", ".join(map(str, iterations)) or "none published"


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def run(args: argparse.Namespace) -> int:
    """Print the contents on standard output."""
    contents = read(args.path)
    if args.json:
        print(json.dumps(asdict(contents), indent=2))  # noqa: T201 - for pipes
        return 0
    _print(contents, args.tensors)
    return 0


def _print(contents: Contents, every: bool) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    output = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    table = Table(show_header=False, title=f"{contents.format} checkpoint")
    for title, value in {**contents.facts, **_totals(contents)}.items():
        table.add_row(title, value)
    output.print(table)
    if every:
        listing = Table(Column("tensor", overflow="fold"), "shape", "dtype", "file")
        for tensor in contents.tensors:
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            listing.add_row(tensor.name, shape, tensor.dtype, tensor.file)
        output.print(listing)


def _totals(contents: Contents) -> dict[str, str]:
    return {
        "tensors": f"{len(contents.tensors):,} in {words.many(contents.files, 'file')}",
        "parameters": _by_dtype(contents.tensors),
        "size on disk": words.size(contents.bytes),
    }


def _by_dtype(tensors: Iterable[Stored]) -> str:
    numbers: Counter[str] = Counter()
    for tensor in tensors:
        numbers[tensor.dtype] += tensor.numbers
    shares = ", ".join(f"{count:,} {dtype}" for dtype, count in numbers.most_common())
    return f"{numbers.total():,} ({shares})"
