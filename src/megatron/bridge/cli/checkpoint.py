# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge checkpoint``: list, inspect, verify, compare or convert Megatron checkpoints."""

import argparse
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.bridge.checkpoint import bucket, lock, manifest, paths
from megatron.bridge.cli.support.text_format import folder_size, many, say, shape, size
from megatron.bridge.utils import storage
from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.checkpoint.inspection import StoredTensor


def run(args: argparse.Namespace) -> int:
    commands = {
        "list": _list,
        "inspect": _inspect,
        "verify": _verify,
        "diff": _diff,
        "convert": _convert,
    }
    return commands[args.subcommand](args)


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
        when = (
            datetime.fromtimestamp(directory.stat().st_mtime)
            .astimezone()
            .strftime("%Y-%m-%d %H:%M:%S")
        )
        mark = "  newest" if number == newest else ""
        say(
            f"{directory.name}  {when}  {size(folder_size(directory)):>9}  {_state(directory)}{mark}"
        )
    if not found:
        say("no checkpoints")
    for path in sorted(root.glob("iter_*.incomplete")):
        say(f"{path.name}  left by an interrupted save; the next run removes it")
    if (holder := lock.holder(root)) is not None:
        say(
            f"being written by {holder}"
            if holder.is_here and holder.is_alive
            else f"last written by {holder}"
        )
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
    directories, damaged = _to_verify(args), 0  # before anything slow is imported
    from megatron.bridge.checkpoint.verification import verify

    for directory in directories:
        try:
            verify(directory, "fast" if args.fast else "full")
            hashed = (directory / manifest.NAME).is_file()
            say(
                f"{directory}: "
                + ("as it was saved" if hashed else "no manifest, so only sizes were compared")
            )
        except manifest.DamagedError as error:
            damaged += 1
            say(str(error))
    return int(damaged > 0)


def _to_verify(args: argparse.Namespace) -> list[Path]:
    if not args.all:
        return [paths.resolve(args.path)]
    found = [
        paths.iteration_dir(args.path, number) for number in paths.published_iterations(args.path)
    ]
    if not found:
        raise UserError(f"{args.path} has no iter_* directory: give the folder of a run")
    return found


def _diff(args: argparse.Namespace) -> int:
    lines = 0
    for line in _differences(paths.resolve(args.first), paths.resolve(args.second), args.values):
        lines += 1
        say(line)
    if not lines:
        say(
            f"no difference in names, shapes{', dtypes and values' if args.values else ' and dtypes'}"
        )
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
    for (tensor, a), (_, b) in zip(
        read_tensors(first, wanted), read_tensors(second, wanted), strict=True
    ):
        if not a.equal(b):
            most = (a.double() - b.double()).abs().max()
            yield f"{tensor.name}: {int((a != b).sum()):,} of {a.numel():,} values differ, by at most {most:.3g}"


def _convert(args: argparse.Namespace) -> int:
    source = paths.resolve(args.path)  # before anything slow is imported
    kept = args.run_config or source / paths.RUN_CONFIG
    if args.run_config is not None and not kept.is_file():
        raise UserError(f"--run-config {kept} is not a file")
    config = yaml_text.read(kept.read_text(), str(kept)) if kept.is_file() else None
    from megatron.bridge.checkpoint.inspection import convert_checkpoint

    say(str(convert_checkpoint(source, args.target, config)))
    return 0


def _describe(tensor: "StoredTensor") -> str:
    return f"{shape(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
