# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge inspect``: the contents of a checkpoint, read from its headers."""

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.bridge.checkpoint import paths
from megatron.bridge.cli.support import text_format
from megatron.bridge.cli.support.options import add_trust_checkpoint
from megatron.bridge.cli.support.parser import POSITIONAL, Parser, location_path
from megatron.bridge.utils.errors import UserError, first_few

if TYPE_CHECKING:
    from megatron.bridge.models.hf_pretrained import PreTrainedCausalLM

PARALLEL_SIZES = ("tensor", "pipeline", "context", "expert")
_MEGATRON = (paths.TRACKER, "metadata.json")


DESCRIPTION = (
    "Show parameters, dtypes, files, parallel layout and iteration of a checkpoint in either "
    "format. Only headers are read."
)


def add_arguments(parser: Parser) -> None:
    parser.description = DESCRIPTION
    parser.add_hidden_names({"--hf-model": POSITIONAL, "--megatron-path": POSITIONAL})
    parser.add_argument(
        "path", type=location_path, metavar="DIR", help="Hugging Face model, or Megatron checkpoint"
    )
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_trust_checkpoint(parser)


@dataclass(frozen=True)
class ListedTensor:
    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str

    @property
    def numbers(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Contents:
    """What a checkpoint contains."""

    format: str  # ``Hugging Face`` or ``Megatron``
    facts: dict[str, str]  # properties of the whole checkpoint, by title
    tensors: tuple[ListedTensor, ...]  # the weights; optimizer state appears only in ``facts``
    bytes: int
    files: int  # number of files with tensors


def read(path: Path) -> Contents:
    if not path.exists():
        raise UserError(f"{path} does not exist: give the directory of a model or of a checkpoint")
    from megatron.bridge.models.hf_pretrained.hub import is_hf_model

    if is_hf_model(path):
        return _hugging_face(path)
    if paths.iteration_of(path) is None and not any((path / name).is_file() for name in _MEGATRON):
        raise UserError(
            f"{path} is not a checkpoint: give a folder with config.json (Hugging Face) or {paths.TRACKER} (Megatron)"
        )
    return _megatron(path)


def _hugging_face(path: Path) -> Contents:
    from megatron.bridge.models.hf_pretrained import PreTrainedCausalLM

    pretrained = PreTrainedCausalLM(path)
    config = pretrained.raw_config
    tensors = tuple(
        ListedTensor(
            entry.name, entry.shape, str(entry.dtype).removeprefix("torch."), entry.file.name
        )
        for entry in pretrained.state.entries.values()
    )
    properties = {
        "architecture": ", ".join(config.get("architectures") or ("not named",)),
        "dtype in config.json": str(config.get("dtype") or config.get("torch_dtype")),
        **_sizes(config, "num_hidden_layers"),
        **_unread_facts(pretrained, [tensor.name for tensor in tensors]),
    }
    return Contents(
        "Hugging Face",
        properties,
        tensors,
        text_format.folder_size(path),
        len({tensor.file for tensor in tensors}),
    )


def _unread_facts(pretrained: "PreTrainedCausalLM", tensor_names: list[str]) -> dict[str, str]:
    """Return what transformers' own model does not read of the config and does not load of the weights."""
    from megatron.bridge.models.conversion.declare.fields import IRRELEVANT
    from megatron.bridge.models.hf_pretrained import transformers_reads

    raw = pretrained.raw_config
    config = pretrained.config.to_dict()
    keys = [key for key in raw if key not in IRRELEVANT]
    unread = {
        "keys that transformers never reads": transformers_reads.unread_keys(config, keys, raw),
        "tensors that transformers does not load": transformers_reads.unread_tensors(
            config, tensor_names
        ),
    }
    return {title: first_few(names, 12) for title, names in unread.items() if names}


def _megatron(path: Path) -> Contents:
    from megatron.bridge.checkpoint import inspection, model_io

    directory = paths.resolve(path)
    tensors = inspection.list_tensors(directory)
    files = _files_by_tensor(directory)
    weights = tuple(
        ListedTensor(
            tensor.name,
            tensor.shape,
            str(tensor.dtype).removeprefix("torch."),
            first_few(files[tensor.name], 1),
        )
        for tensor in tensors.values()
        if inspection.is_weight(tensor.name)
    )
    published = (
        ", ".join(map(str, paths.published_iterations(directory.parent))) or "none published"
    )
    properties = {
        "iteration": f"{paths.iteration_of(directory)} (published: {published})",
        **_facts_of_model(directory),
        "optimizer state": "yes"
        if any(name.startswith("optimizer.") for name in tensors)
        else "no",
        "tokenizer": "yes" if model_io.tokenizer_dir(directory) else "no",
    }
    return Contents(
        "Megatron",
        properties,
        weights,
        text_format.folder_size(directory),
        len(list(directory.glob("*.distcp"))),
    )


def _facts_of_model(directory: Path) -> dict[str, str]:
    """Facts from the run's config, which other programs, such as Megatron-LM, do not write."""
    from megatron.bridge.checkpoint import model_io

    if not (directory / paths.RUN_CONFIG).is_file():
        return {"model": f"unknown: there is no {paths.RUN_CONFIG}"}
    model = model_io.read_run_config(directory)["model"]
    return {
        "provider": str(model.get("_target_")),
        **_sizes(model, "num_layers"),
        "layout of the run": _layout(model),
    }


def _sizes(config: Any, layers: str) -> dict[str, str]:
    keys = {"layers": layers, "hidden size": "hidden_size", "vocabulary": "vocab_size"}
    return {title: str(config.get(key)) for title, key in keys.items()}


def _files_by_tensor(directory: Path) -> dict[str, list[str]]:
    from megatron.bridge.checkpoint import loading

    files: dict[str, set[str]] = {}
    for index, storage_info in loading.check_files(directory).storage_data.items():
        files.setdefault(index.fqn, set()).add(storage_info.relative_path)
    return {name: sorted(names) for name, names in files.items()}


def _layout(model: dict[str, Any]) -> str:
    sizes = (
        f"{kind} {model.get(f'{kind}_model_parallel_size', model.get(f'{kind}_parallel_size', 1))}"
        for kind in PARALLEL_SIZES
    )
    return " x ".join(sizes)


def run(args: argparse.Namespace) -> int:
    contents = read(args.path)
    if args.json:
        text_format.say(json.dumps(asdict(contents), indent=2))
        return 0
    _print(contents, args.tensors)
    return 0


def _print(contents: Contents, list_tensors: bool) -> None:
    from rich.table import Column, Table

    output = text_format.table_console()
    table = Table(show_header=False, title=f"{contents.format} checkpoint")
    for title, value in {**contents.facts, **_totals(contents)}.items():
        table.add_row(title, value)
    output.print(table)
    if list_tensors:
        listing = Table(Column("tensor", overflow="fold"), "shape", "dtype", "file")
        for tensor in contents.tensors:
            listing.add_row(tensor.name, text_format.shape(tensor.shape), tensor.dtype, tensor.file)
        output.print(listing)


def _totals(contents: Contents) -> dict[str, str]:
    return {
        "tensors": f"{len(contents.tensors):,} in {text_format.many(contents.files, 'file')}",
        "parameters": _by_dtype(contents.tensors),
        "size on disk": text_format.size(contents.bytes),
    }


def _by_dtype(tensors: Iterable[ListedTensor]) -> str:
    numbers: Counter[str] = Counter()
    for tensor in tensors:
        numbers[tensor.dtype] += tensor.numbers
    shares = ", ".join(f"{count:,} {dtype}" for dtype, count in numbers.most_common())
    return f"{numbers.total():,} ({shares})"
