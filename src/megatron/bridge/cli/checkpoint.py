# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge checkpoint``: what is in a folder of checkpoints, and whether it is what was saved."""

import argparse
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.bridge.checkpoint import layout, lock, manifest
from megatron.bridge.cli import words
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.checkpoint.contents import Tensor

EXAMPLES = """examples:
  megatron-bridge checkpoint list runs/llama
  megatron-bridge checkpoint verify runs/llama --all
  megatron-bridge checkpoint diff runs/llama/iter_0000100 runs/llama/iter_0000200 --values
  megatron-bridge checkpoint convert megatron_lm/iter_0005000 runs/converted
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``checkpoint`` and its subcommands."""
    parser = subparsers.add_parser(
        "checkpoint",
        help="list, inspect, verify, compare or convert Megatron checkpoints",
        description="List, inspect, verify, compare or convert Megatron checkpoints.",
        epilog=EXAMPLES,
    )
    commands = parser.add_subparsers(dest="checkpoint_command", required=True, metavar="COMMAND")
    where = "run folder, or one iter_* directory"
    add = commands.add_parser("list", help="checkpoints of a run, newest last")
    add.add_argument("path", type=Path, help="run folder")
    add = commands.add_parser("inspect", help="files, sizes, tensors")
    add.add_argument("path", type=Path, help=where)
    add.add_argument("--tensors", metavar="TEXT", help="list the tensors whose names contain TEXT ('' lists all)")
    add = commands.add_parser("verify", help="compare every byte with what was saved; exit code 1 if one differs")
    add.add_argument("path", type=Path, help=where)
    add.add_argument("--fast", action="store_true", help="sizes, and the content of small files only")
    add.add_argument("--all", action="store_true", help="every checkpoint of the folder, not only the newest")
    add = commands.add_parser("diff", help="how two checkpoints differ; exit code 1 if they do")
    add.add_argument("first", type=Path, help=where)
    add.add_argument("second", type=Path, help=where)
    add.add_argument("--values", action="store_true", help="compare the numbers, too")
    add = commands.add_parser("convert", help="write weights, Megatron-LM's for one, in this package's layout")
    add.add_argument("path", type=Path, help=where)
    add.add_argument("target", type=Path, help="folder to write to")
    add.add_argument("--run-config", type=Path, metavar="FILE", help="run_config.yaml to keep with the weights")


def run(args: argparse.Namespace) -> int:
    """Do what was asked."""
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "list": _list,
        "inspect": _inspect,
        "verify": _verify,
        "diff": _diff,
        "convert": _convert,
    }
    return actions[args.checkpoint_command](args)


def _list(args: argparse.Namespace) -> int:
    root: Path = args.path
    if not root.is_dir():
        raise UserError(f"{root} is not a folder: give the folder of a run")
    try:
        newest, trouble = layout.latest_iteration(root), None
    except manifest.DamagedError as error:
        newest, trouble = None, str(error)
    found = layout.published_iterations(root)
    for number in found:
        directory = layout.iteration_dir(root, number)
        when = datetime.fromtimestamp(directory.stat().st_mtime).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        mark = "  newest" if number == newest else ""
        _say(f"{directory.name}  {when}  {_size(directory):>9}  {_state(directory)}{mark}")
    if not found:
        _say("no checkpoints")
    for path in sorted(root.glob("iter_*.incomplete")):
        _say(f"{path.name}  left by an interrupted save; the next run removes it")
    if (holder := lock.holder(root)) is not None:
        _say(f"being written by {holder}" if holder.is_here and holder.is_alive else f"last written by {holder}")
    if trouble:
        _say(trouble)
    return int(trouble is not None)


def _state(directory: Path) -> str:
    """Whether the files look whole, in one or two words; reads only small ones."""
    try:
        found = manifest.read(directory)
    except manifest.DamagedError:
        return "damaged"
    if found is None:
        return "no manifest"
    return "damaged" if manifest.problems(directory, found, found.files, "fast") else "whole"


def _inspect(args: argparse.Namespace) -> int:
    from megatron.bridge.checkpoint.contents import is_weight, tensors

    directory = layout.resolve(args.path)
    found = tensors(directory)
    _say(f"{directory}: {_size(directory)}, {_state(directory)}")
    for title, belongs in (("weights", is_weight), ("optimizer", lambda name: not is_weight(name))):
        mine = [tensor for name, tensor in found.items() if belongs(name)]
        numbers = f"{sum(map(_numel, mine)):,} numbers, {words.size(_total(mine))}"
        _say(f"{title}: {words.many(len(mine), 'tensor')}, {numbers}" if mine else f"{title}: none")
    if args.tensors is not None:
        for name, tensor in found.items():
            if args.tensors in name:
                _say(f"{name}  {_describe(tensor)}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from megatron.bridge.checkpoint.verification import verify

    damaged = 0
    for directory in _to_verify(args):
        try:
            verify(directory, "fast" if args.fast else "full")
            hashed = (directory / manifest.NAME).is_file()
            _say(f"{directory}: " + ("as it was saved" if hashed else "no manifest, so only sizes were compared"))
        except manifest.DamagedError as error:
            damaged += 1
            _say(str(error))
    return int(damaged > 0)


def _to_verify(args: argparse.Namespace) -> list[Path]:
    if not args.all:
        return [layout.resolve(args.path)]
    found = [layout.iteration_dir(args.path, number) for number in layout.published_iterations(args.path)]
    if not found:
        raise UserError(f"{args.path} holds no iter_* directory: give the folder of a run")
    return found


def _diff(args: argparse.Namespace) -> int:
    lines = 0
    for line in _differences(layout.resolve(args.first), layout.resolve(args.second), args.values):
        lines += 1
        _say(line)
    if not lines:
        _say("no difference in names, shapes and types" + (" and values" if args.values else ""))
    return int(lines > 0)


def _differences(first: Path, second: Path, values: bool) -> Iterator[str]:
    from megatron.bridge.checkpoint.contents import read, tensors

    one, other = tensors(first), tensors(second)
    yield from (f"only in {first}: {name}" for name in one if name not in other)
    yield from (f"only in {second}: {name}" for name in other if name not in one)
    both = [name for name in one if name in other]
    for name in both:
        if one[name] != other[name]:
            yield f"{name}: {_describe(one[name])} and {_describe(other[name])}"
    same = [name for name in both if one[name] == other[name]] if values else []
    wanted = [one[name] for name in same]
    for (tensor, a), (_, b) in zip(read(first, wanted), read(second, wanted), strict=True):
        if not a.equal(b):
            most = (a.double() - b.double()).abs().max()
            yield f"{tensor.name}: {int((a != b).sum()):,} of {a.numel():,} numbers differ, by {most:.3g} at most"


def _convert(args: argparse.Namespace) -> int:
    from megatron.bridge.checkpoint.contents import convert
    from megatron.bridge.utils.config import yaml_text

    source = layout.resolve(args.path)
    config = None
    kept = args.run_config or source / layout.RUN_CONFIG
    if kept.is_file():
        config = yaml_text.read(kept.read_text(), str(kept))
    elif args.run_config is not None:
        raise UserError(f"--run-config {kept} is not a file")
    _say(str(convert(source, args.target, config)))
    return 0


def _size(directory: Path) -> str:
    return words.size(sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()))


def _numel(tensor: "Tensor") -> int:
    return tensor.size // tensor.dtype.itemsize


def _total(found: "list[Tensor]") -> int:
    return sum(tensor.size for tensor in found)


def _describe(tensor: "Tensor") -> str:
    shape = "x".join(map(str, tensor.shape)) or "a number"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
