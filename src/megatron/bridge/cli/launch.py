# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge launch``: start a recipe here or on Slurm through NeMo-Run, or write it for Kubernetes."""

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from megatron.bridge.cli.support import train_job
from megatron.bridge.cli.support.options import add_recipe_options
from megatron.bridge.cli.support.output_files import YamlFile, header
from megatron.bridge.cli.support.parser import OptionGroup, Parser
from megatron.bridge.cli.support.text_format import say, write_file
from megatron.bridge.launchers import job_folder, preflight
from megatron.bridge.launchers.kubernetes import KubernetesOptions, manifest
from megatron.bridge.launchers.options import LaunchOptions
from megatron.bridge.launchers.targets import TARGETS
from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.config.origins import annotated_yaml
from megatron.bridge.utils.errors import UserError

RUN_RECIPE = "run_recipe.py"


EXAMPLES = r"""examples:
  megatron-bridge launch --local --recipe llama32_1b_pretrain_config --devices 2 train.train_iters=10
  megatron-bridge launch --recipe llama3_8b_pretrain_config --nodes 4 --devices 8 --partition gpu --account A \
      --time 04:00:00 --retries 5 checkpoint.save=runs/llama
  megatron-bridge launch --on kubernetes --recipe llama3_8b_pretrain_config --nodes 4 --devices 8 \
      --container-image registry/bridge:1 --mount shared:/shared --rdma rdma/ib=8 checkpoint.save=/shared/llama
"""


def add_arguments(parser: Parser) -> None:
    parser.description = (
        "Start a recipe, or a script of your own, on this machine or on a Slurm cluster, through "
        "NeMo-Run."
    )
    parser.epilog = EXAMPLES
    program_options = parser.add_argument_group("what to run")
    add_recipe_options(program_options)
    program_options.add_argument(
        "--script",
        default=RUN_RECIPE,
        metavar="FILE",
        help="Python script (default: %(default)s)",
    )
    _add_process_options(parser.add_argument_group("processes"))
    _add_slurm_options(parser.add_argument_group("Slurm"))
    _add_kubernetes_options(
        parser.add_argument_group("Kubernetes (a manifest is written, nothing is submitted)")
    )
    _add_environment_options(parser.add_argument_group("environment of the job"))


def _add_process_options(group: OptionGroup) -> None:
    group.add_argument(
        "--local", action="store_true", help="run on this machine, in the foreground"
    )
    group.add_argument(
        "--devices",
        type=int,
        default=1,
        metavar="N",
        help="processes (GPUs) per node (default: 1)",
    )
    group.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes (default: 1)")
    group.add_argument(
        "--cpu",
        action="store_true",
        help="request no GPUs; the processes communicate over gloo",
    )
    group.add_argument(
        "--launcher",
        choices=["torchrun", "ft", "default"],
        default="torchrun",
        help="what starts the processes: torchrun, ft_launcher, or Slurm itself (default: torchrun)",
    )
    group.add_argument(
        "--dry-run", action="store_true", help="print what would be submitted, and exit"
    )
    group.add_argument(
        "--detach",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="exit when the jobs are queued",
    )
    group.add_argument(
        "--tail-logs", action="store_true", help="follow the log; implies --no-detach"
    )
    group.add_argument(
        "--experiment-name",
        metavar="NAME",
        help="name of the folder and the job (default: the recipe's name)",
    )
    group.add_argument(
        "--on",
        choices=list(TARGETS),
        default="slurm",
        help="where the run is started (default: slurm)",
    )
    group.add_argument(
        "--executor",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help=(
            "further field of NeMo-Run's DockerExecutor, such as shm_size=30g, the value in YAML; "
            "repeatable"
        ),
    )


def _add_slurm_options(group: OptionGroup) -> None:
    group.add_argument(
        "--partition", metavar="NAME", help="partition (default: the cluster's default)"
    )
    group.add_argument(
        "--account", metavar="NAME", help="account to charge (default: your default account)"
    )
    group.add_argument(
        "--time",
        default="04:00:00",
        metavar="LIMIT",
        help="time limit of one job (default: 04:00:00)",
    )
    group.add_argument(
        "--gres",
        metavar="LIST",
        help="generic resources per node, instead of --devices GPUs",
    )
    group.add_argument(
        "--cpus-per-task",
        type=int,
        default=0,
        metavar="N",
        help="CPUs of each process (default: the cluster's)",
    )
    group.add_argument(
        "--preempt-time",
        type=int,
        default=120,
        metavar="S",
        help="seconds before the time limit at which the run saves and exits (default: 120)",
    )
    group.add_argument(
        "--retries",
        type=int,
        default=0,
        metavar="N",
        help="requeue a job that ended early, at most N times (default: 0)",
    )
    group.add_argument(
        "--chain",
        type=int,
        default=1,
        metavar="N",
        help="number of jobs to run one after the other (default: 1)",
    )
    group.add_argument(
        "--ssh-tunnel", action="store_true", help="submit from another machine, over SSH"
    )
    group.add_argument("--host", metavar="NAME", help="login node, for --ssh-tunnel")
    group.add_argument("--user", metavar="NAME", help="user name on the login node")
    group.add_argument(
        "--identity",
        type=Path,
        metavar="FILE",
        help="private key (default: ask for a password)",
    )
    group.add_argument(
        "--remote-job-dir",
        type=Path,
        metavar="DIR",
        help="folder of the jobs (default: ~/.nemo_run)",
    )


def _add_kubernetes_options(group: OptionGroup) -> None:
    group.add_argument(
        "--kind",
        choices=["jobset", "pytorchjob"],
        help="object of the manifest (default: jobset)",
    )
    group.add_argument(
        "--namespace",
        metavar="NAME",
        help="namespace (default: that of kubectl's context)",
    )
    group.add_argument(
        "--resource",
        action="append",
        metavar="NAME=QUANTITY",
        help="further resource of a pod, such as memory=900Gi; repeatable",
    )
    group.add_argument(
        "--rdma", metavar="NAME=COUNT", help="network adapters of a pod, such as rdma/ib=8"
    )
    group.add_argument(
        "--output", type=YamlFile, metavar="FILE", help="manifest (default: standard output)"
    )


def _add_environment_options(group: OptionGroup) -> None:
    group.add_argument(
        "--container-image", metavar="IMAGE", help="container image to run in (pyxis)"
    )
    group.add_argument(
        "--mount",
        action="append",
        default=[],
        metavar="FROM:TO",
        help="directory to mount into the container, on Kubernetes CLAIM:/PATH; repeatable",
    )
    group.add_argument(
        "--venv",
        type=Path,
        metavar="DIR",
        help="virtual environment of the job (default: the current one)",
    )
    group.add_argument(
        "--packager",
        choices=["pattern", "git", "none"],
        default="pattern",
        help=(
            "code to run: a copy of the working tree, the last commit, or the code in place "
            "(default: pattern)"
        ),
    )
    group.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment variable; repeatable",
    )
    group.add_argument(
        "--perf-env",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="set environment variables for GPU performance",
    )
    group.add_argument("--nsys", action="store_true", help="profile with Nsight Systems")


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked on this machine, quick checks first; then submit or run."""
    _refuse(args)
    if args.on == "kubernetes":
        return _write_manifest(args)
    options = _options(args)
    options.validate()
    preflight.check(options)
    submits = args.on == "slurm" and not (options.local or options.dry_run)
    shell = preflight.run_here
    if submits and options.ssh_tunnel:
        from megatron.bridge.launchers.nemo import remote_shell

        shell = remote_shell(options)
    if submits:
        preflight.check_cluster(options, shell)
    config = _checked_config(args, options) if args.script == RUN_RECIPE else None
    if options.dry_run and (args.on == "ray" or not preflight.has_nemo_run()):
        say(_without_nemo_run(options))
        return 0
    if args.on == "ray":
        from megatron.bridge.launchers.ray_cluster import launch

        return launch(options)
    # NeMo-Run takes seconds to import, so the checks without it come first
    from megatron.bridge.launchers import nemo

    if options.dry_run:
        say("\n".join(f"# {name}\n{text}" for name, text in nemo.scripts(options).items()))
        return 0
    if submits:
        preflight.check_scripts(nemo.scripts(options), shell)
    done = nemo.launch(options)
    job_folder.write_job_folder(done.folder, options, done.jobs, config)
    for job in done.jobs:
        say(f"submitted batch job {job}")
    say(f"scripts, config and logs are in {done.folder}")
    ended = sorted({state for state in done.states if state != "SUCCEEDED"})
    if ended:
        raise UserError(
            f"the run ended with state {', '.join(ended)}: see its log in {done.folder}"
        )
    return 0


def _without_nemo_run(options: LaunchOptions) -> str:
    """Describe the launch without NeMo-Run, which writes the batch scripts."""
    target = "this machine" if options.local else options.on
    lines = [
        f"on {target}: {options.nodes} x {options.devices} processes, started by {options.launcher}",
        shlex.join([str(options.script), *options.arguments]),
        f"NeMo-Run is not installed, so this dry run cannot show its batch script: {preflight.INSTALL}",
    ]
    return "\n".join(f"# {line}" for line in lines[: 2 if options.on == "ray" else None])


def _refuse(args: argparse.Namespace) -> None:
    """Refuse options that were given and would have no effect."""
    defaults = Parser()
    add_arguments(defaults)
    names = TARGETS[args.on].refused
    if given := [name for name in names if getattr(args, name) != defaults.get_default(name)]:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UserError(f"--on {args.on} takes no {options}: leave that out, or change --on")


def _write_manifest(args: argparse.Namespace) -> int:
    if args.container_image is None:
        raise UserError(
            "--on kubernetes needs --container-image: name an image that has this package"
        )
    own_script = args.script != RUN_RECIPE
    program = [args.script] if own_script else ["-m", "megatron.bridge.cli.main", "train"]
    given = {
        "kind": args.kind or "jobset",
        "program": (*program, *_forward_arguments(args)),
        "experiment_name": args.experiment_name
        or (args.recipe or Path(args.script).stem).replace("_", "-").lower(),
        "resource": dict(_variable(item, "--resource") for item in args.resource or ()),
    }
    text = yaml.safe_dump(
        manifest(KubernetesOptions(**_options_of(KubernetesOptions, args, given))), sort_keys=False
    )
    if not own_script:
        train_job.prepare(args).resolve(args.nodes * args.devices)
    if args.output is None:
        say(text.rstrip())
        return 0
    write_file("--output", args.output, header("launch") + text)
    say(f"{args.output}: start it with kubectl apply -f {args.output}")
    return 0


def _options(args: argparse.Namespace) -> LaunchOptions:
    pairs = (_variable(item, "--executor") for item in args.executor)
    given = {
        "script": _script(args.script),
        "arguments": tuple(_forward_arguments(args)),
        "experiment_name": args.experiment_name or args.recipe or Path(args.script).stem,
        "detach": args.detach and not args.tail_logs,
        "packager": TARGETS[args.on].packager or args.packager,
        "executor": {name: yaml_text.read(value) for name, value in pairs},
    }
    return LaunchOptions(**_options_of(LaunchOptions, args, given))


def _options_of(kind: Any, args: argparse.Namespace, given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of dataclass ``kind``: the values in ``given``, and the options with the fields' names."""
    given = given | {"env": dict(_variable(item) for item in args.env), "mount": tuple(args.mount)}
    return given | {
        field.name: getattr(args, field.name) for field in fields(kind) if field.name not in given
    }


def _script(name: str) -> Path:
    """Return the path of the script.

    A relative path may also start at the folder ``scripts/training`` of a checkout. An installed package has no such
    folder, but the default script.
    """
    of_checkout = Path(__file__).parents[4] / "scripts" / "training" / name
    candidates = [Path(name), of_checkout]
    if name == RUN_RECIPE:
        candidates.append(Path(__file__).parent / "entry" / RUN_RECIPE)
    for path in candidates:
        if path.is_file():
            return path
    raise UserError(f"--script {name} does not exist: give the path of a Python script")


def _variable(item: str, option: str = "--env") -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals:
        raise UserError(f"{option} {item} has no value: write NAME=VALUE")
    return name, value


UNDERSCORED = ("step_func", "seq_length", "peft_scheme", "packed_sequence")
"""Options that the scripts of the Megatron Bridge API have with underscores."""


def _forward_arguments(args: argparse.Namespace) -> Iterator[str]:
    """Yield the arguments that select and change the config; options first."""
    job = Parser(add_help=False)
    add_recipe_options(job)
    for action in job._actions:
        value = getattr(args, action.dest)
        if value == action.default or not action.option_strings:
            continue
        is_underscored = action.dest in UNDERSCORED
        yield f"--{action.dest}" if is_underscored else action.option_strings[0]
        if action.nargs != 0:
            yield from map(str, value if isinstance(value, list) else [value])
    yield from args.overrides


def _checked_config(args: argparse.Namespace, options: LaunchOptions) -> str:
    """The config of the run as YAML, checked now and not after hours in the queue."""
    job = train_job.prepare(args)
    text = annotated_yaml(job.config, job.origins)
    job.config.validate(options.world_size)
    if options.nsys and not (job.config.profiling and job.config.profiling.use_nsys_profiler):
        raise UserError("--nsys would record nothing: add profiling.use_nsys_profiler=true")
    return text
