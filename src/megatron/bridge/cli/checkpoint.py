# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge checkpoint``: list, inspect, verify, compare or convert Megatron checkpoints."""

import argparse
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.bridge.checkpoint import bucket, lock, manifest, paths
from megatron.bridge.cli.support.options import add_trust_checkpoint
from megatron.bridge.cli.support.parser import Parser, location_path
from megatron.bridge.cli.support.text_format import folder_size, many, say, shape, size
from megatron.bridge.utils import storage
from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.checkpoint.inspection import StoredTensor


EXAMPLES = """examples:
  megatron-bridge checkpoint list runs/llama
  megatron-bridge checkpoint verify runs/llama --all
  megatron-bridge checkpoint diff runs/llama/iter_0000100 runs/llama/iter_0000200 --values
  megatron-bridge checkpoint convert megatron_lm/iter_0005000 runs/converted
"""


def add_arguments(parser: Parser) -> None:
    parser.description = "List, inspect, verify, compare or convert Megatron checkpoints."
    parser.epilog = EXAMPLES
    commands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    one_checkpoint = "run folder, or one iter_* directory in it"

    listing = commands.add_parser("list", help="list the checkpoints of a run, newest last")
    listing.set_defaults(run_subcommand=list_checkpoints)
    listing.add_argument("path", type=location_path, help="run folder")

    inspecting = commands.add_parser("inspect", help="show files, sizes and tensors")
    inspecting.set_defaults(run_subcommand=inspect_checkpoint)
    inspecting.add_argument("path", type=location_path, help=one_checkpoint)
    inspecting.add_argument(
        "--tensors",
        nargs="?",
        const="",
        metavar="TEXT",
        help="list the tensors whose names contain TEXT (without TEXT: all)",
    )
    add_trust_checkpoint(inspecting)

    verifying = commands.add_parser(
        "verify", help="compare every byte with what was saved; exit code 1 if any differs"
    )
    verifying.set_defaults(run_subcommand=verify_checkpoints)
    verifying.add_argument("path", type=location_path, help=one_checkpoint)
    verifying.add_argument(
        "--fast",
        action="store_true",
        help="compare only sizes and the content of small files",
    )
    verifying.add_argument(
        "--all",
        action="store_true",
        help="verify every checkpoint of the folder, not only the newest",
    )

    comparing = commands.add_parser(
        "diff", help="compare two checkpoints; exit code 1 if they differ"
    )
    comparing.set_defaults(run_subcommand=compare_checkpoints)
    comparing.add_argument("first", type=location_path, help=one_checkpoint)
    comparing.add_argument("second", type=location_path, help=one_checkpoint)
    comparing.add_argument("--values", action="store_true", help="also compare the values")
    add_trust_checkpoint(comparing)

    converting = commands.add_parser(
        "convert", help="write foreign weights, such as Megatron-LM's, in this package's format"
    )
    converting.set_defaults(run_subcommand=convert_weights)
    converting.add_argument("path", type=location_path, help=one_checkpoint)
    converting.add_argument("target", type=location_path, help="folder to write to")
    converting.add_argument(
        "--run-config",
        type=Path,
        metavar="FILE",
        help="run_config.yaml to store with the weights",
    )
    add_trust_checkpoint(converting)


def run(args: argparse.Namespace) -> int:
    return args.run_subcommand(args)


def list_checkpoints(args: argparse.Namespace) -> int:
    root: Path = args.path
    bucket.refresh(root)
    if not root.is_dir():
        raise UserError(f"{root} is not a folder: give the folder of a run")
    try:
        newest = paths.latest_iteration(root)
        trouble = None
    except manifest.DamagedError as error:
        newest = None
        trouble = str(error)
    iterations = paths.published_iterations(root)
    for iteration in iterations:
        directory = paths.iteration_dir(root, iteration)
        storage.pull(directory, bucket.is_small)
        when = (
            datetime.fromtimestamp(directory.stat().st_mtime)
            .astimezone()
            .strftime("%Y-%m-%d %H:%M:%S")
        )
        mark = "  newest" if iteration == newest else ""
        say(
            f"{directory.name}  {when}  {size(folder_size(directory)):>9}  {_state(directory)}{mark}"
        )
    if not iterations:
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
    """Return ``complete``, ``damaged`` or ``no manifest``; only small files are read."""
    try:
        stored_manifest = manifest.read(directory)
    except manifest.DamagedError:
        return "damaged"
    if stored_manifest is None:
        return "no manifest"
    return (
        "damaged"
        if manifest.problems(directory, stored_manifest, stored_manifest.files, "fast")
        else "complete"
    )


def inspect_checkpoint(args: argparse.Namespace) -> int:
    directory = paths.resolve(args.path)  # before anything slow is imported
    from megatron.bridge.checkpoint.inspection import is_weight, list_tensors

    tensors = list_tensors(directory)
    say(f"{directory}: {size(folder_size(directory))}, {_state(directory)}")
    for title, belongs in (("weights", is_weight), ("optimizer", lambda name: not is_weight(name))):
        tensors_of_part = [tensor for name, tensor in tensors.items() if belongs(name)]
        count = sum(tensor.size // tensor.dtype.itemsize for tensor in tensors_of_part)
        values = f"{count:,} values, {size(sum(tensor.size for tensor in tensors_of_part))}"
        say(
            f"{title}: {many(len(tensors_of_part), 'tensor')}, {values}"
            if tensors_of_part
            else f"{title}: none"
        )
    if args.tensors is not None:
        for name, tensor in tensors.items():
            if args.tensors in name:
                say(f"{name}  {_describe(tensor)}")
    return 0


def verify_checkpoints(args: argparse.Namespace) -> int:
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
    directories = [
        paths.iteration_dir(args.path, iteration)
        for iteration in paths.published_iterations(args.path)
    ]
    if not directories:
        raise UserError(f"{args.path} has no iter_* directory: give the folder of a run")
    return directories


def compare_checkpoints(args: argparse.Namespace) -> int:
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

    first_tensors = list_tensors(first)
    second_tensors = list_tensors(second)
    yield from (f"only in {first}: {name}" for name in first_tensors if name not in second_tensors)
    yield from (f"only in {second}: {name}" for name in second_tensors if name not in first_tensors)
    both = [name for name in first_tensors if name in second_tensors]
    for name in both:
        if first_tensors[name] != second_tensors[name]:
            yield f"{name}: {_describe(first_tensors[name])} and {_describe(second_tensors[name])}"
    same = [name for name in both if first_tensors[name] == second_tensors[name]] if values else []
    tensors = [first_tensors[name] for name in same]
    for (tensor, a), (_, b) in zip(
        read_tensors(first, tensors), read_tensors(second, tensors), strict=True
    ):
        if not a.equal(b):
            largest = (a.double() - b.double()).abs().max()
            yield f"{tensor.name}: {int((a != b).sum()):,} of {a.numel():,} values differ, by at most {largest:.3g}"


def convert_weights(args: argparse.Namespace) -> int:
    source = paths.resolve(args.path)  # before anything slow is imported
    run_config_file = args.run_config or source / paths.RUN_CONFIG
    if args.run_config is not None and not run_config_file.is_file():
        raise UserError(f"--run-config {run_config_file} is not a file")
    config = (
        yaml_text.read(run_config_file.read_text(), str(run_config_file))
        if run_config_file.is_file()
        else None
    )
    from megatron.bridge.checkpoint.inspection import convert_checkpoint

    say(str(convert_checkpoint(source, args.target, config)))
    return 0


def _describe(tensor: "StoredTensor") -> str:
    return f"{shape(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
