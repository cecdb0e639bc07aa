# SPDX-License-Identifier: Apache-2.0
"""What can be known before anything is submitted: the host, the folder, the partition, and Slurm's own opinion."""

import base64
import importlib.util
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.bridge.launchers.options import LaunchOptions
from megatron.bridge.launchers.targets import TARGETS
from megatron.bridge.utils.environment import CHANGES, git
from megatron.bridge.utils.errors import UserError, did_you_mean

SSH_PORT, CONNECT_SECONDS = 22, 10


@dataclass(frozen=True)
class ShellResult:
    """How a command ended, and what it said."""

    code: int
    text: str


Shell = Callable[[str], ShellResult]  # runs one command line where the jobs are submitted
INSTALL = "pip install 'hf-megatron-bridge[launch]'"


def has_nemo_run() -> bool:
    return importlib.util.find_spec("nemo_run") is not None


def check(options: LaunchOptions) -> None:
    """Refuse what this machine already knows to fail."""
    target = TARGETS[options.on]
    if target.module is not None and importlib.util.find_spec(target.module) is None:
        raise UserError(
            f"--on {options.on} needs the module {target.module}, which is not installed: {target.install}"
        )
    if not (options.dry_run or options.on == "ray" or has_nemo_run()):
        raise UserError(
            f"launching needs NeMo-Run, which is not installed: {INSTALL}, or start "
            "`torchrun -m megatron.bridge train` on each machine"
        )
    if options.packager == "git" and not options.local:
        _check_git(options.script)
    if options.local:
        if options.launcher == "ft" and shutil.which("ft_launcher") is None:
            raise UserError(
                "--launcher ft needs ft_launcher on the path: pip install 'hf-megatron-bridge[resiliency]', or "
                "use --launcher torchrun"
            )
    elif (
        options.on == "slurm"
        and not (options.ssh_tunnel or options.dry_run)
        and shutil.which("sbatch") is None
    ):
        raise UserError(
            "there is no sbatch on this machine: use --local, or --ssh-tunnel --host LOGIN_NODE"
        )


def check_host(host: str) -> None:
    """Refuse a host that does not answer, before an SSH library waits for minutes."""
    try:
        socket.create_connection((host, SSH_PORT), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"--host {host} cannot be reached by SSH: {reason}; check the name and your VPN"
        ) from error


def check_cluster(options: LaunchOptions, shell: Shell) -> None:
    """Ask for the folder, the partition and its time limit."""
    if options.remote_job_dir is not None:
        _check_folder(str(options.remote_job_dir), shell)
    if not options.detach and (answer := shell("sacct --noheader --allocations")).code:
        raise UserError(
            f"--no-detach follows jobs through sacct, which says: {answer.text.strip()}; use --detach"
        )
    answer = shell("sinfo --noheader --format='%P %l'")
    if answer.code:
        raise UserError(f"Slurm does not answer: {answer.text.strip()}")
    limits = dict(line.split() for line in answer.text.splitlines() if line.strip())
    default = next((name for name in limits if name.endswith("*")), None)
    limits = {name.rstrip("*"): limit for name, limit in limits.items()}
    name = options.partition or (default and default.rstrip("*"))
    if name is None:
        raise UserError(
            f"this cluster has no default partition: name one with --partition: {', '.join(limits)}"
        )
    if name not in limits:
        hint = did_you_mean(name, limits) or f": there are {', '.join(limits)}"
        raise UserError(f"--partition {name} does not exist{hint}")
    if seconds(options.time) > seconds(limits[name]):
        # Slurm takes such a job, and never starts it
        raise UserError(
            f"--time {options.time} is more than partition {name} allows, which is {limits[name]}"
        )


def check_scripts(scripts: dict[str, str], shell: Shell) -> None:
    """Show Slurm the batch scripts, without queueing them."""
    for text in scripts.values():
        encoded = base64.b64encode(text.encode()).decode()
        answer = shell(f"echo {encoded} | base64 -d | sbatch --test-only")
        if answer.code:
            raise UserError(f"Slurm refuses the job: {_reason(answer.text)}{_hint(answer.text)}")


def seconds(limit: str) -> float:
    """Seconds of a time limit in one of Slurm's forms.

    Example:
        >>> seconds("1-12"), seconds("90"), seconds("30:15"), seconds("04:00:00"), seconds("infinite")
        (129600.0, 5400.0, 1815.0, 14400.0, inf)
    """
    if limit == "infinite":
        return float("inf")
    days, dash, rest = limit.rpartition("-")
    numbers = [int(part) for part in rest.split(":")]
    if not dash and len(numbers) < 3:
        numbers = [0, *numbers]  # without days: minutes, or minutes:seconds
    hours, minutes, last = [*numbers, 0, 0][:3]
    return float(86400 * int(days or 0) + 3600 * hours + 60 * minutes + last)


def run_here(command: str) -> ShellResult:
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    return ShellResult(done.returncode, done.stdout + done.stderr)


def _check_folder(folder: str, shell: Shell) -> None:
    name = shlex.quote(folder)
    answer = shell(f"mkdir -p {name} && test -w {name}")
    if answer.code:
        reason = answer.text.strip() or "it is read-only"
        raise UserError(
            f"--remote-job-dir {folder} cannot be written: {reason}; name another folder"
        )


def _reason(text: str) -> str:
    """The last line of sbatch, without its prefixes."""
    return (
        text.strip()
        .splitlines()[-1]
        .removeprefix("allocation failure: ")
        .removeprefix("sbatch: error: ")
    )


def _hint(text: str) -> str:
    hints = {
        "account": "; name yours with --account",
        "partition": "; name one with --partition",
        "node configuration": "; sinfo -Nel shows what the nodes have: lower --nodes or --devices",
        "generic resource": "; sinfo -o %G shows what the nodes have, --gres names it, --cpu asks for none",
        "time limit": "; make --time shorter",
    }
    return next((hint for word, hint in hints.items() if word in text.lower()), "")


def _check_git(script: Path) -> None:
    folder = script.absolute().parent
    changed = git(folder, *CHANGES)
    if changed is None:
        raise UserError(
            f"--packager git: {folder} is not in a git repository; use --packager pattern"
        )
    if changed:
        first = changed.splitlines()[0][3:]
        raise UserError(
            f"--packager git sends the last commit, without the changes in {first}: commit them, or use "
            f"--packager pattern, which sends the code as it is"
        )
