# SPDX-License-Identifier: Apache-2.0
"""A Slurm cluster by hand, of one node, this machine, or of two, each with a network and a host name of its own."""

import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import ClassVar

from megatron.bridge.utils.processes import free_port
from tests.namespaces import TwoNamespaces

NEEDED = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scontrol",
    "squeue",
    "scancel",
    "sinfo",
)

CONF = """
ClusterName=toy
SlurmctldHost={host}({address})
AuthType=auth/munge
# a job that is queued again may start after this many seconds; Slurm waits for old credentials to expire
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
SlurmUser=root
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin={binding}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout={lost}
KillWait=30
SchedulerParameters=sched_interval=2,batch_sched_delay=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=toy Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=NO
"""


def missing() -> str | None:
    """Why Slurm cannot be started here, or None."""
    absent = [name for name in NEEDED if shutil.which(name, path=_path()) is None]
    if absent:
        return f"no {', '.join(absent)}: install slurmctld, slurmd, slurm-client and munge"
    return None if os.geteuid() == 0 else "Slurm's daemons need root"


class SlurmNode:
    """The daemons of a cluster and the environment of its commands.

    Attributes:
        environment: What ``sbatch`` and its like need to find this cluster.
        partition: Its only partition.
    """

    partition = "toy"

    def __init__(self, folder: Path, cpus: int = 2) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
        self._daemons: list[subprocess.Popen[bytes]] = []
        nodes = self.addresses()
        for name in ("state", *(f"spool/{node}" for node in nodes)):
            (folder / name).mkdir(parents=True)
        lines = [
            f"NodeName={name} NodeAddr={at} CPUs={cpus} RealMemory=2000"
            for name, at in nodes.items()
        ]
        first, port = next(iter(nodes)), free_port(2)
        (folder / "slurm.conf").write_text(
            CONF.format(
                folder=folder,
                host=first,
                address=nodes[first],
                nodes="\n".join(lines),
                ctld_port=port,
                slurmd_port=port + 1,
                **self.settings,
            )
        )

    settings: ClassVar[dict[str, str]] = {"binding": "task/none", "lost": "300"}
    """What differs between the clusters: who binds tasks to CPUs, and after how long a silent node is lost."""

    def addresses(self) -> dict[str, str]:
        """The nodes by name; the first has the controller, and is where commands run."""
        return {socket.gethostname().split(".")[0]: "127.0.0.1"}

    def inside(self, node: str) -> list[str]:
        """What stands before a command that runs on a node."""
        return []

    @property
    def login(self) -> list[str]:
        """What stands before a command of a user."""
        return self.inside(next(iter(self.addresses())))

    def __enter__(self) -> "SlurmNode":
        names = list(self.addresses())
        try:
            self._start_munge()
            self._start("slurmctld", "-D", "-f", str(self.folder / "slurm.conf"), node=names[0])
            for name in names:
                self.start_node(name)
            idle = ["idle"] * len(names)
            self.wait_for(
                lambda: self.run("sinfo", "-h", "-N", "-o", "%T").split() == idle, "idle nodes", 300
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def start_node(self, name: str) -> None:
        self._start("slurmd", "-D", "-N", name, "-f", str(self.folder / "slurm.conf"), node=name)

    def __exit__(self, *_: object) -> None:
        if len(self._daemons) > 2:
            self.run(
                "scancel", "--full", "--signal=KILL", f"--partition={self.partition}", check=False
            )
            time.sleep(0.5)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def run(self, *command: str, check: bool = True) -> str:
        """Standard output of a command of this cluster."""
        done = subprocess.run(
            [*self.login, *command],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """The state of a job, such as ``RUNNING``; Slurm forgets finished ones after minutes."""
        shown = self.run("scontrol", "show", "job", job)
        return shown.split("JobState=")[1].split()[0]

    def wait_for(self, condition, what: str, seconds: float = 60) -> None:
        """Poll until the condition holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"no {what} after {seconds} s\n{self._logs()}"
            time.sleep(0.2)

    def _start(self, *command: str, node: str = "") -> None:
        log = (self.folder / f"{command[0]}{node}.out").open("ab")
        whole = [*(self.inside(node) if node else []), *command]
        self._daemons.append(
            subprocess.Popen(
                whole, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        )

    def _start_munge(self) -> None:
        home = self.folder / "munge"
        home.mkdir(mode=0o700)
        key = home / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        owner = pwd.getpwnam("munge")
        for path in (home, key):
            os.chown(path, owner.pw_uid, owner.pw_gid)
        # munged refuses sockets in folders that others may write
        self._start(
            "munged",
            "--foreground",
            "--force",
            f"--socket={self.folder}/munge.socket",
            f"--key-file={key}",
            f"--log-file={home}/log",
            f"--pid-file={home}/pid",
            f"--seed-file={home}/seed",
        )
        self.wait_for((self.folder / "munge.socket").exists, "socket of munge", 300)

    def _logs(self) -> str:
        texts = [
            f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in self.folder.glob("*.log")
        ]
        return "\n".join(texts)


class TwoSlurmNodes(SlurmNode):
    """``node1`` and ``node2``: network namespaces with host names; ``node1`` has the controller, too."""

    settings: ClassVar[dict[str, str]] = {"binding": "task/affinity", "lost": "10"}

    def __init__(self, folder: Path, namespaces: TwoNamespaces) -> None:
        self.namespaces = namespaces
        self._numbers = {"node1": 0, "node2": 1}
        super().__init__(folder)
        lines = [f"{address} {name}\n" for name, address in self.addresses().items()]
        (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))

    def addresses(self) -> dict[str, str]:
        return {name: self.namespaces.addresses[number] for name, number in self._numbers.items()}

    def inside(self, node: str) -> list[str]:
        own = f'hostname {node} && mount --bind {self.folder}/hosts /etc/hosts && exec "$@"'
        return [
            *self.namespaces.inside(self._numbers[node]),
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-c",
            own,
            node,
        ]

    def ranks(self, node: str) -> list[int]:
        """The processes of a node that train."""
        pids = self.namespaces.processes(self._numbers[node])
        return [
            pid for pid in pids if re.match(r"\S*python\S* (-u )?\S*run_recipe.py ", _command(pid))
        ]

    def lose(self, node: str) -> None:
        """As when the power fails: no process ends in order, and no connection is closed."""
        self.namespaces.plug(self._numbers[node], "down")
        self.namespaces.kill_all(self._numbers[node])

    def bring_back(self, node: str) -> None:
        self.namespaces.plug(self._numbers[node], "up")
        self.start_node(node)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:  # it ended meanwhile
        return ""


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"
