# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge launch``: start a recipe here or on a Slurm cluster, through NeMo-Run."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.launchers.options import LaunchOptions

EXAMPLES = """examples:
  megatron-bridge launch --local --recipe llama32_1b_pretrain_config --devices 2 train.train_iters=10
  megatron-bridge launch --recipe llama3_8b_pretrain_config --nodes 4 --devices 8 --partition gpu --account A \\
      --time 04:00:00 --retries 5 checkpoint.save=runs/llama
"""
RUN_RECIPE = "run_recipe.py"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``launch``."""
    from megatron.bridge.cli.train import add_job_options

    parser = subparsers.add_parser(
        "launch",
        help="start a recipe here or on a Slurm cluster",
        description="Start a recipe, or a script of your own, here or on a Slurm cluster, through NeMo-Run.",
        epilog=EXAMPLES,
    )
    job = parser.add_argument_group("what runs")
    before = len(parser._actions)
    add_job_options(job)  # pyright: ignore[reportArgumentType]  a group adds arguments, too
    parser.set_defaults(job_actions=parser._actions[before:])
    job.add_argument("--script", default=RUN_RECIPE, metavar="FILE", help="Python script (default: %(default)s)")
    _add_place(parser)
    _add_slurm(parser)
    _add_surroundings(parser)


def _add_place(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where")
    group.add_argument("--local", action="store_true", help="here, in the foreground")
    group.add_argument("--devices", type=int, default=1, metavar="N", help="processes (GPUs) of a node (1)")
    group.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes (1)")
    group.add_argument("--cpu", action="store_true", help="ask for no GPUs; the processes talk over gloo")
    group.add_argument(
        "--launcher",
        choices=("torchrun", "ft", "default"),
        default="torchrun",
        help="who starts the processes: torchrun, ft_launcher, or Slurm itself (torchrun)",
    )
    group.add_argument("--dry-run", action="store_true", help="print what would be submitted, and end")
    group.add_argument(
        "--detach", action=argparse.BooleanOptionalAction, default=True, help="leave when the jobs are queued"
    )
    group.add_argument("--tail-logs", action="store_true", help="follow the log; means --no-detach")
    group.add_argument("--experiment-name", metavar="NAME", help="name of folder and job (default: the recipe's)")


def _add_slurm(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Slurm")
    group.add_argument("--partition", metavar="NAME", help="partition (default: the cluster's)")
    group.add_argument("--account", metavar="NAME", help="account to charge (default: yours)")
    group.add_argument("--time", default="04:00:00", metavar="LIMIT", help="limit of one job (04:00:00)")
    group.add_argument("--gres", metavar="LIST", help="generic resources of a node, instead of --devices GPUs")
    group.add_argument(
        "--preempt-time",
        type=int,
        default=120,
        metavar="S",
        help="seconds before the limit to save in (120)",
    )
    group.add_argument(
        "--retries", type=int, default=0, metavar="N", help="queue a job that ended early again, N times (0)"
    )
    group.add_argument("--chain", type=int, default=1, metavar="N", help="N jobs in a row (1)")
    group.add_argument("--ssh-tunnel", action="store_true", help="submit from another machine, over SSH")
    group.add_argument("--host", metavar="NAME", help="login node, for --ssh-tunnel")
    group.add_argument("--user", metavar="NAME", help="user there")
    group.add_argument("--identity", type=Path, metavar="FILE", help="private key (default: ask for a password)")
    group.add_argument("--remote-job-dir", type=Path, metavar="DIR", help="folder of the jobs (~/.nemo_run)")


def _add_surroundings(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("surroundings")
    group.add_argument("--container-image", metavar="IMAGE", help="run in this image (pyxis)")
    group.add_argument(
        "--mount", action="append", default=[], metavar="FROM:TO", help="mount into the container; repeatable"
    )
    group.add_argument("--venv", type=Path, metavar="DIR", help="environment of the job (default: this one)")
    group.add_argument(
        "--packager",
        choices=("pattern", "git", "none"),
        default="pattern",
        help="code that the job runs: a copy of this one, the last commit, or what is there (pattern)",
    )
    group.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable; repeatable"
    )
    group.add_argument(
        "--perf-env", action=argparse.BooleanOptionalAction, default=True, help="set variables that GPUs like"
    )
    group.add_argument("--nsys", action="store_true", help="profile with Nsight Systems")


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked here, the quick things first; then submit, or run."""
    options = _options(args)
    options.validate()
    from megatron.bridge.launchers import checks, folder

    checks.check(options)
    submits = not (options.local or options.dry_run)
    shell = checks.run_here
    if submits and options.ssh_tunnel:
        from megatron.bridge.launchers.nemo import remote_shell

        shell = remote_shell(options)
    if submits:
        checks.check_cluster(options, shell)
    # NeMo-Run takes seconds to import: after what is known without it
    from megatron.bridge.launchers import nemo

    config = _checked_config(args, options) if args.script == RUN_RECIPE else None
    if options.dry_run:
        _print("".join(f"# {name}\n{text}\n" for name, text in nemo.scripts(options).items()))
        return 0
    if submits:
        checks.check_scripts(nemo.scripts(options), shell)
    done = nemo.launch(options)
    folder.write(done.folder, options, done.jobs, config)
    for job in done.jobs:
        _print(f"submitted batch job {job}\n")
    _print(f"everything about it is in {done.folder}\n")
    ended = sorted({state for state in done.states if state != "SUCCEEDED"})
    if ended:
        raise UserError(f"the run ended as {', '.join(ended)}: its log, {done.folder}, says why")
    return 0


def _options(args: argparse.Namespace) -> "LaunchOptions":
    from dataclasses import fields

    from megatron.bridge.launchers.options import LaunchOptions

    own = {
        "script": _script(args.script),
        "arguments": tuple(_forwarded(args)),
        "experiment_name": args.experiment_name or args.recipe or Path(args.script).stem,
        "env": dict(_variable(item) for item in args.env),
        "mount": tuple(args.mount),
        "detach": args.detach and not args.tail_logs,
    }
    given = {field.name: getattr(args, field.name) for field in fields(LaunchOptions) if field.name not in own}
    return LaunchOptions(**given, **own)


def _script(name: str) -> Path:
    """The script as given, else the one of that name beside ``launch_with_nemo_run.py``."""
    for path in (Path(name), Path(__file__).parents[4] / "scripts" / "training" / name):
        if path.is_file():
            return path
    raise UserError(f"--script {name} is not there: give the path of a Python script")


def _variable(item: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals:
        raise UserError(f"--env {item} has no value: write NAME=VALUE")
    return name, value


def _forwarded(args: argparse.Namespace) -> Iterator[str]:
    """The words that describe the job, as they were typed; options first."""
    for action in args.job_actions:
        value = getattr(args, action.dest)
        if value != action.default and action.option_strings:
            yield action.option_strings[0]
            if action.nargs != 0:
                yield from map(str, value if isinstance(value, list) else [value])
    yield from args.overrides


def _checked_config(args: argparse.Namespace, options: "LaunchOptions") -> str:
    """The config of the run; what torchrun would refuse after hours in the queue is refused here."""
    from megatron.bridge.cli import train
    from megatron.bridge.utils.config import origins

    job = train.prepare(args)
    text = origins.annotated_yaml(job.config)
    job.config.validate(options.world_size)
    if options.nsys and not (job.config.profiling and job.config.profiling.use_nsys_profiler):
        raise UserError("--nsys waits for a range that no step opens: add profiling.use_nsys_profiler=true")
    return text


def _print(text: str) -> None:
    import sys

    sys.stdout.write(text)
