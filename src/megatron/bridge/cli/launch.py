# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge launch``: start a recipe here or on Slurm through NeMo-Run, or write it for Kubernetes."""

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from megatron.bridge.cli.support import output_files, train_job
from megatron.bridge.cli.support.parser import Parser, add_options, add_shared
from megatron.bridge.cli.support.text_format import say, write_file
from megatron.bridge.launchers import job_folder, preflight
from megatron.bridge.launchers.kubernetes import KubernetesOptions, manifest
from megatron.bridge.launchers.options import LaunchOptions
from megatron.bridge.launchers.targets import TARGETS
from megatron.bridge.utils.config import yaml_text
from megatron.bridge.utils.config.origins import annotated_yaml
from megatron.bridge.utils.errors import UserError

RUN_RECIPE = "run_recipe.py"


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
    place = "this machine" if options.local else options.on
    lines = [
        f"on {place}: {options.nodes} x {options.devices} processes, started by {options.launcher}",
        shlex.join([str(options.script), *options.arguments]),
        f"NeMo-Run is not installed, so this dry run cannot show its batch script: {preflight.INSTALL}",
    ]
    return "\n".join(f"# {line}" for line in lines[: 2 if options.on == "ray" else None])


def _refuse(args: argparse.Namespace) -> None:
    """Refuse options that were given and would have no effect."""
    from megatron.bridge.cli.main import SUBCOMMANDS

    defaults = Parser()
    add_options(defaults, SUBCOMMANDS["launch"]["options"])
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
    own = {
        "kind": args.kind or "jobset",
        "program": (*program, *_forwarded(args)),
        "experiment_name": args.experiment_name
        or (args.recipe or Path(args.script).stem).replace("_", "-").lower(),
        "resource": dict(_variable(item, "--resource") for item in args.resource or ()),
    }
    text = yaml.safe_dump(
        manifest(KubernetesOptions(**_options_of(KubernetesOptions, args, own))), sort_keys=False
    )
    if not own_script:
        train_job.prepare(args).resolve(args.nodes * args.devices)
    if args.output is None:
        say(text.rstrip())
        return 0
    write_file("--output", args.output, output_files.header("launch") + text)
    say(f"{args.output}: start it with kubectl apply -f {args.output}")
    return 0


def _options(args: argparse.Namespace) -> LaunchOptions:
    pairs = (_variable(item, "--executor") for item in args.executor)
    own = {
        "script": _script(args.script),
        "arguments": tuple(_forwarded(args)),
        "experiment_name": args.experiment_name or args.recipe or Path(args.script).stem,
        "detach": args.detach and not args.tail_logs,
        "packager": TARGETS[args.on].packager or args.packager,
        "executor": {name: yaml_text.read(value) for name, value in pairs},
    }
    return LaunchOptions(**_options_of(LaunchOptions, args, own))


def _options_of(kind: Any, args: argparse.Namespace, own: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of dataclass ``kind``: the values in ``own``, and the options with the fields' names."""
    own = own | {"env": dict(_variable(item) for item in args.env), "mount": tuple(args.mount)}
    return own | {
        field.name: getattr(args, field.name) for field in fields(kind) if field.name not in own
    }


def _script(name: str) -> Path:
    """Return the path of the script.

    A relative path may also start at the folder ``scripts/training`` of a checkout. An installed package has no such
    folder, but the default script.
    """
    of_checkout = Path(__file__).parents[4] / "scripts" / "training" / name
    candidates = [Path(name), of_checkout]
    if name == RUN_RECIPE:
        candidates.append(Path(__file__).with_name(RUN_RECIPE))
    for path in candidates:
        if path.is_file():
            return path
    raise UserError(f"--script {name} does not exist: give the path of a Python script")


def _variable(item: str, option: str = "--env") -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals:
        raise UserError(f"{option} {item} has no value: write NAME=VALUE")
    return name, value


def _forwarded(args: argparse.Namespace) -> Iterator[str]:
    """The arguments that select and change the config, as the user typed them; options first."""
    job = Parser(add_help=False)
    add_shared(job, "job")
    for action in job._actions:
        value = getattr(args, action.dest)
        if value != action.default and action.option_strings:
            yield action.option_strings[0]
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
