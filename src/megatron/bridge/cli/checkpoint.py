# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge checkpoint``: list, inspect, verify, compare or convert Megatron checkpoints."""

import argparse
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.bridge.checkpoint import bucket, lock, manifest, paths
from megatron.bridge.cli.support.model_options import add_trust_checkpoint
from megatron.bridge.cli.support.text_format import folder_size, many, say, shape, size
from megatron.bridge.utils import storage
from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.checkpoint.inspection import StoredTensor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    where = "run folder, or one iter_* directory in it"
    add = commands.add_parser("list", help="list the checkpoints of a run, newest last")
    add.add_argument("path", type=Path, help="run folder")
    add.set_defaults(action=_list)
    add = commands.add_parser("inspect", help="show files, sizes and tensors")
    add.add_argument("path", type=Path, help=where)
    add.add_argument("--tensors", metavar="TEXT", help="list the tensors whose names contain TEXT ('': all)")
    add.set_defaults(action=_inspect)
    add = commands.add_parser("verify", help="compare every byte with what was saved; exit code 1 if any differs")
    add.add_argument("path", type=Path, help=where)
    add.add_argument("--fast", action="store_true", help="compare only sizes and the content of small files")
    add.add_argument("--all", action="store_true", help="verify every checkpoint of the folder, not only the newest")
    add.set_defaults(action=_verify)
    add = commands.add_parser("diff", help="compare two checkpoints; exit code 1 if they differ")
    add.add_argument("first", type=Path, help=where)
    add.add_argument("second", type=Path, help=where)
    add.add_argument("--values", action="store_true", help="also compare the values")
    add.set_defaults(action=_diff)
    add = commands.add_parser("convert", help="write foreign weights, such as Megatron-LM's, in this package's format")
    add.add_argument("path", type=Path, help=where)
    add.add_argument("target", type=Path, help="folder to write to")
    add.add_argument("--run-config", type=Path, metavar="FILE", help="run_config.yaml to store with the weights")
    add.set_defaults(action=_convert)
    for name in ("inspect", "diff", "convert"):
        add_trust_checkpoint(commands.choices[name])


def run(args: argparse.Namespace) -> int:
    return args.action(args)


def _list(args: argparse.Namespace) -> int:
    root: Path = args.path
    bucket.refresh(root)
    if not root.is_dir():
        raise UserError(f"{root} is not a folder: give the folder of a run")
    try:
        newest, trouble = paths.latest_iteration(root), None
    except manifest.DamagedError as error:
        newest, trouble = None, str(error)
    found = paths.published_iterations(root)
    for number in found:
        directory = paths.iteration_dir(root, number)
        storage.pull(directory, bucket.is_small)
        when = datetime.fromtimestamp(directory.stat().st_mtime).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        mark = "  newest" if number == newest else ""
        say(f"{directory.name}  {when}  {size(folder_size(directory)):>9}  {_state(directory)}{mark}")
    if not found:
        say("no checkpoints")
    for path in sorted(root.glob("iter_*.incomplete")):
        say(f"{path.name}  left by an interrupted save; the next run removes it")
    if (holder := lock.holder(root)) is not None:
        say(f"being written by {holder}" if holder.is_here and holder.is_alive else f"last written by {holder}")
    if trouble:
        say(trouble)
    return int(trouble is not None)


def _state(directory: Path) -> str:
    """``whole``, ``damaged`` or ``no manifest``; only small files are read."""
    try:
        found = manifest.read(directory)
    except manifest.DamagedError:
        return "damaged"
    if found is None:
        return "no manifest"
    return "damaged" if manifest.problems(directory, found, found.files, "fast") else "whole"


def _inspect(args: argparse.Namespace) -> int:
    directory = paths.resolve(args.path)  # before anything slow is imported
    from megatron.bridge.checkpoint.inspection import is_weight, list_tensors

    found = list_tensors(directory)
    say(f"{directory}: {size(folder_size(directory))}, {_state(directory)}")
    for title, belongs in (("weights", is_weight), ("optimizer", lambda name: not is_weight(name))):
        mine = [tensor for name, tensor in found.items() if belongs(name)]
        count = sum(tensor.size // tensor.dtype.itemsize for tensor in mine)
        values = f"{count:,} values, {size(sum(tensor.size for tensor in mine))}"
        say(f"{title}: {many(len(mine), 'tensor')}, {values}" if mine else f"{title}: none")
    if args.tensors is not None:
        for name, tensor in found.items():
            if args.tensors in name:
                say(f"{name}  {_describe(tensor)}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from megatron.bridge.checkpoint.verification import verify

    damaged = 0
    for directory in _to_verify(args):
        try:
            verify(directory, "fast" if args.fast else "full")
            hashed = (directory / manifest.NAME).is_file()
            say(f"{directory}: " + ("as it was saved" if hashed else "no manifest, so only sizes were compared"))
        except manifest.DamagedError as error:
            damaged += 1
            say(str(error))
    return int(damaged > 0)


def _to_verify(args: argparse.Namespace) -> list[Path]:
    if not args.all:
        return [paths.resolve(args.path)]
    found = [paths.iteration_dir(args.path, number) for number in paths.published_iterations(args.path)]
    if not found:
        raise UserError(f"{args.path} has no iter_* directory: give the folder of a run")
    return found


def _diff(args: argparse.Namespace) -> int:
    lines = 0
    for line in _differences(paths.resolve(args.first), paths.resolve(args.second), args.values):
        lines += 1
        say(line)
    if not lines:
        say(f"no difference in names, shapes{', dtypes and values' if args.values else ' and dtypes'}")
    return int(lines > 0)


def _differences(first: Path, second: Path, values: bool) -> Iterator[str]:
    from megatron.bridge.checkpoint.inspection import list_tensors, read_tensors

    one, other = list_tensors(first), list_tensors(second)
    yield from (f"only in {first}: {name}" for name in one if name not in other)
    yield from (f"only in {second}: {name}" for name in other if name not in one)
    both = [name for name in one if name in other]
    for name in both:
        if one[name] != other[name]:
            yield f"{name}: {_describe(one[name])} and {_describe(other[name])}"
    same = [name for name in both if one[name] == other[name]] if values else []
    wanted = [one[name] for name in same]
    for (tensor, a), (_, b) in zip(read_tensors(first, wanted), read_tensors(second, wanted), strict=True):
        if not a.equal(b):
            most = (a.double() - b.double()).abs().max()
            yield f"{tensor.name}: {int((a != b).sum()):,} of {a.numel():,} values differ, by at most {most:.3g}"


def _convert(args: argparse.Namespace) -> int:
    from megatron.bridge.checkpoint.inspection import convert_checkpoint

    source = paths.resolve(args.path)
    kept = args.run_config or source / paths.RUN_CONFIG
    if args.run_config is not None and not kept.is_file():
        raise UserError(f"--run-config {kept} is not a file")
    config = yaml_text.read(kept.read_text(), str(kept)) if kept.is_file() else None
    say(str(convert_checkpoint(source, args.target, config)))
    return 0


def _describe(tensor: "StoredTensor") -> str:
    return f"{shape(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
