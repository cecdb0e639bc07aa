# SPDX-License-Identifier: Apache-2.0
"""The cost of setting up one rank as the number of ranks grows, without GPUs and without other processes.

usage: python benchmarks/scale.py [--recipe NAME] [--sizes N ...] [--picture FILE]
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SIZES = (256, 1024, 4096, 16384, 65536)


def measure(recipe: str, world_size: int) -> None:
    """Print the parts of one rank's set-up as JSON; each size has a process of its own."""
    from megatron.bridge.cli.rehearse.rank import rehearse_parts, resolved_config
    from megatron.bridge.cli.support.options import add_recipe_options
    from megatron.bridge.cli.support.parser import Parser
    from megatron.bridge.cli.support.train_job import prepare

    parser = Parser()
    add_recipe_options(parser)
    # each data-parallel rank needs a sample
    job = prepare(parser.parse_args(["--recipe", recipe, f"train.global_batch_size={max(SIZES)}"]))
    parts: list[Any] = []
    rehearse_parts(resolved_config(job, world_size), world_size // 2 + 5, world_size, parts.append)
    print(json.dumps([vars(part) for part in parts]))


def measured(recipe: str, world_size: int) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--recipe", recipe, "--only", str(world_size)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def draw(table: dict[int, list[dict[str, Any]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for index, part in enumerate(table[min(table)]):
        if max(parts[index]["cpu"] for parts in table.values()) >= 0.05:
            axes.plot(
                list(table),
                [parts[index]["cpu"] for parts in table.values()],
                "o-",
                label=part["name"],
            )
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="processor seconds of one rank")
    axes.set_xticks(list(table), [f"{size:,}" for size in table])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="llama31_405b_pretrain_config")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        return measure(args.recipe, args.only)
    table = {size: measured(args.recipe, size) for size in args.sizes}
    for index, part in enumerate(table[args.sizes[0]]):
        cells = [
            f"{parts[index]['cpu']:.2f} s, {parts[index]['received']:.1f} MB"
            for parts in table.values()
        ]
        print(f"| {part['name']} | {' | '.join(cells)} |")
    if args.picture:
        draw(table, args.picture)
    return None


if __name__ == "__main__":
    main()
