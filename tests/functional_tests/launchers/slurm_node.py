# SPDX-License-Identifier: Apache-2.0
"""A Slurm cluster of one node, this machine, on ports of its own: munged, slurmctld and slurmd by hand."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from megatron.bridge.utils.processes import free_port

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")

CONF = """
ClusterName=toy
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
# a job that is queued again may start after this many seconds; Slurm waits for old credentials to expire
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
SlurmUser=root
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=30
SchedulerParameters=sched_interval=2,batch_sched_delay=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName={node} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=2000 State=UNKNOWN
PartitionName=toy Nodes={node} Default=YES MaxTime=60 State=UP OverSubscribe=NO
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
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        node = socket.gethostname().split(".")[0]
        port = free_port(2)
        text = CONF.format(folder=folder, host=node, node=node, cpus=cpus, ctld_port=port, slurmd_port=port + 1)
        (folder / "slurm.conf").write_text(text)

    def __enter__(self) -> "SlurmNode":
        try:
            self._start_munge()
            self._start("slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))
            self._start("slurmd", "-D", "-f", str(self.folder / "slurm.conf"))
            self.wait_for(lambda: self.run("sinfo", "-h", "-o", "%T").strip() == "idle", "an idle node", 300)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if len(self._daemons) == 3:
            self.run("scancel", "--full", "--signal=KILL", f"--partition={self.partition}", check=False)
            time.sleep(0.5)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def run(self, *command: str, check: bool = True) -> str:
        """Standard output of a command of this cluster."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=600, check=False)
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

    def _start(self, *command: str) -> None:
        log = (self.folder / f"{command[0]}.out").open("wb")
        self._daemons.append(
            subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)
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
        texts = [f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in self.folder.glob("*.log")]
        return "\n".join(texts)


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"
