# SPDX-License-Identifier: Apache-2.0
"""From the start of a process to the end of its first step, part by part, on one rank and on two.

``python benchmarks/startup.py`` shrinks the recipe ``smollm2_135m_pretrain_config`` to toy width, trains and saves
a step, and then starts that run again and again, each time in fresh processes, to take the next step from its
checkpoint. It prints a Markdown table of medians; the clock starts as the parent starts the interpreter, or
``torchrun``. The files of Python's packages come from the page cache, unless ``--cold`` gives their pages back
before each start (other processes that hold them keep them).
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ORIGIN = "STARTUP_ORIGIN"  # when the parent started this process, in seconds since the machine was booted
PARTS = {  # functions of training.setup, and what they are called here
    "resolve_run": "config",
    "initialize": "process groups",
    "build_model": "model",
    "build_optimizer": "optimizer",
    "load_run": "checkpoint load",
    "build_data": "data",
}
ROWS = ("launch", "imports", "recipe", *PARTS.values(), "first step", "rest")


def clock() -> float:
    """Seconds since the machine was booted: the same in all processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def first_step(folder: str, saves: bool) -> dict[str, float]:
    """Seconds of each part, in this process."""
    found = {"launch": clock() - float(os.environ[ORIGIN])}
    found["imports"] = seconds(imports)
    config: Any = None

    def recipe() -> None:
        nonlocal config
        config = toy_recipe(folder, saves)

    found["recipe"] = seconds(recipe)
    from megatron.bridge.training import loop, setup
    from megatron.bridge.training.gpt_step import forward_step

    for name, part in PARTS.items():
        setattr(setup, name, recorded(getattr(setup, name), part, found))
    run = setup.setup(config, forward_step)
    found["first step"] = seconds(lambda: loop.train(run))
    found["all"] = clock() - float(os.environ[ORIGIN])
    found["rest"] = found["all"] - sum(value for name, value in found.items() if name != "all")
    return found


def leave() -> None:
    """End the process groups, or gloo's threads abort a process that ends before the others."""
    import torch

    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def imports() -> None:
    """What a training script imports."""
    import megatron.bridge.recipes.smollm
    import megatron.bridge.training.pretrain  # noqa: F401


def toy_recipe(folder: str, saves: bool) -> Any:
    """The recipe at toy width; it trains one step more than is saved."""
    from megatron.bridge.recipes.smollm import smollm2_135m_pretrain_config

    config = smollm2_135m_pretrain_config(
        seq_length=64,
        global_batch_size=2,
        micro_batch_size=1,
        train_iters=1 if saves else 2,
        eval_iters=0,
    )
    config.scheduler.lr_decay_iters = 2
    model = config.model
    model.num_layers, model.hidden_size, model.ffn_hidden_size = 2, 64, 128
    model.num_attention_heads, model.num_query_groups, model.kv_channels = 2, 1, 32
    config.checkpoint.save = folder if saves else None
    config.checkpoint.load = None if saves else folder
    return config


def recorded(
    function: Callable[..., Any], part: str, found: dict[str, float]
) -> Callable[..., Any]:
    """``function``, whose seconds are noted."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        start = clock()
        try:
            return function(*args, **kwargs)
        finally:
            found[part] = clock() - start

    return call


def seconds(action: Callable[[], Any]) -> float:
    """How long it takes."""
    start = clock()
    action()
    return clock() - start


# ------------------------------------------------------------------------------------------------------ the parent


def start(ranks: int, folder: str, saves: bool = False) -> dict[str, float]:
    """What rank 0 of fresh processes finds."""
    launcher = (
        []
        if ranks == 1
        else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    )
    report = Path(folder) / "report.json"
    command = [
        sys.executable,
        *launcher,
        __file__,
        "--worker",
        folder,
        *(["--saves"] if saves else []),
    ]
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    environment = os.environ | threads | {ORIGIN: str(clock())}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"a start failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return json.loads(report.read_text())


def forget_pages() -> None:
    """Give back the page cache of Python's packages."""
    for path in package_files():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def package_files() -> Iterator[Path]:
    """All files of installed packages, and of this one."""
    for folder in {
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        sysconfig.get_path("stdlib"),
    }:
        yield from (path for path in Path(folder).rglob("*") if path.is_file())


def measure(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Starts on each number of ranks, in turn."""
    found: dict[str, list[dict[str, float]]] = {label(ranks): [] for ranks in args.ranks}
    with tempfile.TemporaryDirectory() as name:
        for ranks in args.ranks:
            folder = Path(name) / str(ranks)
            folder.mkdir()
            start(ranks, str(folder), saves=True)
        for _ in range(args.rounds):
            for ranks in args.ranks:
                if args.cold:
                    forget_pages()
                found[label(ranks)].append(start(ranks, str(Path(name) / str(ranks))))
    return found


def label(ranks: int) -> str:
    """A column's head."""
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="read Python's packages from the disk")
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--saves", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        found = first_step(args.worker, args.saves)
        if os.environ.get("RANK", "0") == "0":
            (Path(args.worker) / "report.json").write_text(json.dumps(found))
        leave()
        return
    from measure import table

    found = measure(args)
    middle = {
        name: {
            row: statistics.median(one.get(row, 0.0) for one in starts) for row in (*ROWS, "all")
        }
        for name, starts in found.items()
    }
    cells = [[row, *(f"{values[row]:.2f}" for values in middle.values())] for row in (*ROWS, "all")]
    print(f"\ns, medians of {args.rounds} starts, page cache {'cold' if args.cold else 'warm'}\n")
    print(table(["", *found], cells))


if __name__ == "__main__":
    main()
