# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""NeMo-Run behind one module: executors and packagers from ``LaunchOptions``."""

import os
import shlex
import shutil
import signal
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any

import nemo_run as run
from nemo_run.config import RUNDIR_NAME, get_nemorun_home
from nemo_run.core.execution.launcher import Launcher, Torchrun
from nemo_run.core.frontend.console.api import CONSOLE
from nemo_run.core.packaging.base import Packager
from nemo_run.core.tunnel.client import LocalTunnel, SSHTunnel

import megatron.bridge
from megatron.bridge.launchers.options import LaunchOptions
from megatron.bridge.launchers.preflight import Shell, ShellResult, check_host
from megatron.bridge.utils.errors import UserError, did_you_mean

# this command says itself what it did
CONSOLE.quiet = True

TASK = "train"
CODE = f"/{RUNDIR_NAME}/code"
"""Where the packaged code lies in a container; NeMo-Run puts the job's folder in its place without one."""

FT_PORT, FT_RESTARTS = 29500, 5

PERFORMANCE_ENV = {
    # long runs with changing shapes fragment the caching allocator otherwise
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"
}


@dataclass(kw_only=True)
class WorkingTreePackager(Packager):
    """This package as it is installed here, and the script: ``src/megatron/bridge`` and the script's name."""

    script: str

    def package(self, path: Path, job_dir: str, name: str) -> str:
        archive = Path(job_dir, f"{name}.tar.gz")
        package = Path(megatron.bridge.__file__).parent
        with tarfile.open(archive, "w:gz") as tar:
            for file in sorted(package.rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts:
                    tar.add(file, Path("src/megatron/bridge", file.relative_to(package)))
            tar.add(self.script, Path(self.script).name)
        return str(archive)


@dataclass(frozen=True)
class LaunchResult:
    """The experiment's folder on this machine, Slurm's job ids, and the state of each task for NeMo-Run."""

    folder: Path
    jobs: tuple[str, ...]
    states: tuple[str, ...]


def scripts(options: LaunchOptions) -> dict[str, str]:
    """The batch scripts that would be submitted, by name; of a local run, the command."""
    with _experiment(options) as experiment:
        experiment.dryrun(log=False, delete_exp_dir=False)
        folder = Path(experiment._exp_dir)
        texts = {path.name: path.read_text() for path in sorted(folder.glob("*_sbatch.sh"))}
        if options.on == "docker":
            texts = {"docker": str(experiment.jobs[0]._dryrun_info)}
        shutil.rmtree(folder)
    return texts or {"command": shlex.join(_command(options))}


def remote_shell(options: LaunchOptions) -> Shell:
    assert options.host
    check_host(options.host)
    tunnel = _tunnel(options)
    try:
        tunnel.connect()
    except (SystemExit, OSError) as error:
        raise UserError(
            f"--host {options.host} refuses the login of {options.user}: check --user and --identity"
        ) from error

    def remote(command: str) -> ShellResult:
        done = tunnel.run(command, hide=True, warn=True)
        return ShellResult(done.return_code, done.stdout + done.stderr)

    return remote


def launch(options: LaunchOptions) -> LaunchResult:
    """Submit the jobs, or run here until the end; Ctrl-C and SIGTERM then reach the processes."""
    started: list[Any] = []
    with _signals_to(started), _experiment(options) as experiment:
        started += [experiment] if options.local else []  # jobs in a queue stay there
        experiment.run(
            detach=options.detach and not options.local,
            tail_logs=options.tail_logs or options.local,
        )
        # a handle is slurm_tunnel://nemo_run/12/master/0, where 12 is the job
        handles = [] if options.local else [job.handle for job in experiment.jobs]
        jobs = tuple(handle.partition("://")[2].split("/")[1] for handle in handles)
    states = (
        ()
        if options.detach and not options.local
        else tuple(str(job.state) for job in experiment.jobs)
    )
    return LaunchResult(Path(experiment._exp_dir), jobs, states)


@contextmanager
def _experiment(options: LaunchOptions) -> Iterator[Any]:
    with run.Experiment(
        options.experiment_name,
        base_dir=None
        if options.ssh_tunnel or options.remote_job_dir is None
        else str(options.remote_job_dir),
        clean_mode=True,
        enable_goodbye_message=False,
        skip_status_at_exit=True,
        log_level="WARNING",
    ) as experiment:
        before: list[str] = []
        for index in range(options.chain):
            executor = _executor(options)
            if before:
                executor.dependency_type = (
                    "afterany"  # the one before may end with "start me again"
                )
            name = TASK if options.chain == 1 else f"{TASK}-{index + 1}"
            before = [experiment.add(_task(options), executor, name, dependencies=before)]
        yield experiment


@contextmanager
def _signals_to(experiments: list[Any]) -> Iterator[None]:
    """Hand Ctrl-C and SIGTERM to what runs here: NeMo-Run would wait on, or leave the processes behind."""

    def cancel(signum: int, frame: FrameType | None) -> None:
        if not experiments:
            raise KeyboardInterrupt
        for experiment in experiments:
            for job in experiment.jobs:
                job.cancel(runner=experiment._runner)

    before = {
        signal_number: signal.signal(signal_number, cancel)
        for signal_number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)


def _task(options: LaunchOptions) -> run.Script:
    """What each task runs; NeMo-Run puts torchrun before it, and quotes for that alone."""
    if options.launcher == "torchrun":
        return run.Script(path=_script(options), entrypoint="python", args=list(options.arguments))
    program, *arguments = _program(options)
    words = (
        list(options.arguments)
        if options.local
        else [shlex.quote(word) for word in options.arguments]
    )
    first, *rest = [*arguments, _script(options), *words]
    return run.Script(path=first, entrypoint=program, args=rest)


def _program(options: LaunchOptions) -> list[str]:
    """What starts the script; NeMo-Run's component for ft_launcher passes options that its version 0.7 refuses."""
    if options.launcher != "ft":
        return ["python"]
    words = ["ft_launcher", f"--nproc-per-node={options.devices}", f"--nnodes={options.nodes}"]
    words += [f"--max-restarts={FT_RESTARTS}", "--rdzv-backend=c10d"]
    # variables of the batch script
    return words + (
        ["--rdzv-endpoint=localhost:0"]
        if options.nodes == 1
        else [f"--rdzv-endpoint=$head_node_ip:{FT_PORT}", "--rdzv-id=$SLURM_JOB_ID"]
    )


def _script(options: LaunchOptions) -> str:
    """Where the script lies when the job runs."""
    if options.local or options.packager == "none":
        return str(options.script if options.ssh_tunnel else options.script.absolute())
    if options.packager == "pattern":
        return f"{CODE}/{options.script.name}"
    return f"{CODE}/{options.script.absolute().relative_to(_git_root(options.script))}"


def _git_root(script: Path) -> Path:
    return next(folder for folder in script.absolute().parents if (folder / ".git").exists())


def _packager(options: LaunchOptions) -> Packager:
    if options.packager == "none":
        return Packager()
    if options.packager == "pattern":
        return WorkingTreePackager(script=str(options.script.absolute()))
    return run.GitArchivePackager(basepath=str(_git_root(options.script)), include_submodules=False)


def _launcher(options: LaunchOptions) -> Launcher:
    """What starts the processes; with ``nsys`` under Nsight Systems, for the steps of the config's ``profiling``."""
    return (Torchrun if options.launcher == "torchrun" else Launcher)(nsys_profile=options.nsys)


def _performance_env(options: LaunchOptions) -> dict[str, str]:
    """Environment variables that GPU runs are faster with; what the user set wins."""
    return PERFORMANCE_ENV if options.perf_env and not options.cpu else {}


def _executor(options: LaunchOptions) -> Any:
    if options.local:
        return _local(options)
    return _slurm(options) if options.on == "slurm" else _docker(options)


def _local(options: LaunchOptions) -> run.LocalExecutor:
    binaries = str(Path(sys.executable).parent)
    env = {**_performance_env(options), "PATH": f"{binaries}:{os.environ['PATH']}", **options.env}
    return run.LocalExecutor(
        ntasks_per_node=options.devices, launcher=_launcher(options), env_vars=env
    )


def _slurm(options: LaunchOptions) -> run.SlurmExecutor:
    packaged = {} if options.packager == "none" else {"PYTHONPATH": f"{CODE}/src"}
    env = {**_performance_env(options), **packaged, **options.env}
    return run.SlurmExecutor(
        account=options.account,  # pyright: ignore[reportArgumentType]  None asks for none
        partition=options.partition,
        job_name_prefix=f"{options.experiment_name}.",
        time=options.time,
        nodes=options.nodes,
        # ft_launcher is one task, which starts the processes of a node
        ntasks_per_node=1 if options.launcher == "ft" else options.devices,
        gpus_per_node=None if options.cpu or options.gres is not None else options.devices,
        gres=options.gres,
        cpus_per_task=_cpus(options),
        container_image=options.container_image,
        container_mounts=list(options.mount),
        srun_args=_srun_arguments(options),
        env_vars={name: shlex.quote(value) for name, value in env.items()},
        setup_lines=_activate(options),
        launcher=_launcher(options),
        packager=_packager(options),
        tunnel=_tunnel(options),
        retries=options.retries,
        # so that the run saves and leaves before Slurm ends the job; 0 sends nothing
        signal=f"TERM@{options.preempt_time}" if options.preempt_time else None,
        poll_estimated_start_time=not options.detach,
    )


def _docker(options: LaunchOptions) -> run.DockerExecutor:
    """The executor for one machine's Docker, with the fields that ``--executor`` gives."""
    if options.container_image is None:
        raise UserError("--on docker needs --container-image: name an image that has this package")
    known = [field.name for field in fields(run.DockerExecutor) if field.init]
    for name in options.executor:
        if name not in known:
            raise UserError(
                f"--executor {name}: DockerExecutor has no such field{did_you_mean(name, known)}"
            )
    settings = {
        "container_image": options.container_image,
        "ntasks_per_node": options.devices,
        "num_gpus": 0 if options.cpu else options.devices,
        "volumes": list(options.mount),
        "env_vars": {"PYTHONPATH": f"{CODE}/src", **_performance_env(options), **options.env},
        # data loaders and NCCL share memory, and a container has 64 MB by default
        "ipc_mode": "host",
        "launcher": _launcher(options),
        "packager": _packager(options),
    }
    return run.DockerExecutor(**{**settings, **options.executor})


def _cpus(options: LaunchOptions) -> int | None:
    """The CPUs of a task, which are those of all processes of a node if it starts them."""
    return options.cpus_per_task * (1 if options.launcher == "default" else options.devices) or None


def _srun_arguments(options: LaunchOptions) -> list[str]:
    cpus = _cpus(options)
    arguments = (
        [f"--cpus-per-task={cpus}"] if cpus else []
    )  # since 22.05 srun does not take over that of the job
    if options.container_image is None and not options.ssh_tunnel:
        # relative paths mean what they mean where the launch was typed
        arguments.append(f"--chdir={Path.cwd()}")
    if options.launcher == "default":
        # NeMo-Run has all ranks killed when one fails; but those that leave at a signal may still be saving
        arguments += ["--kill-on-bad-exit=0", "--wait=120"]
    return arguments


def _activate(options: LaunchOptions) -> str | None:
    """Put the environment of the job first on the path; a container brings its own."""
    if options.container_image is not None or (options.ssh_tunnel and options.venv is None):
        return None
    binaries = options.venv.absolute() / "bin" if options.venv else Path(sys.executable).parent
    return f"export PATH={shlex.quote(str(binaries))}:$PATH"


def _tunnel(options: LaunchOptions) -> LocalTunnel | SSHTunnel:
    folder = options.remote_job_dir or Path(get_nemorun_home())
    experiments = str(folder.absolute() / "experiments")
    if not options.ssh_tunnel:
        return LocalTunnel(job_dir=experiments)
    assert options.host
    assert options.user
    identity = None if options.identity is None else str(options.identity.expanduser())
    return SSHTunnel(host=options.host, user=options.user, job_dir=experiments, identity=identity)


def _command(options: LaunchOptions) -> list[str]:
    """What a local run comes to."""
    program = ["torchrun", f"--nproc-per-node={options.devices}"]
    return [
        *(program if options.launcher == "torchrun" else _program(options)),
        _script(options),
        *options.arguments,
    ]
