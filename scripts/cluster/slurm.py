"""A real Slurm on this host: a controller and three virtual nodes, all on loopback.

    with SlurmCluster(workdir) as slurm:
        slurm.call("sbatch", "--array=0-7", "job.sh")

Needs Debian's packages slurmctld, slurmd, slurm-client and munge. Daemons run in the foreground
as children of ours, so that stopping them is certain.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
NODES = ("node1", "node2", "node3")
START_SECONDS = 30.0
# Reactions are quick, for a test: a dead node is noticed in 10 s, a kill follows TERM in 5 s.
CONFIG = """\
ClusterName=captionjob
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobcomp.log
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdTimeout=10
SlurmctldTimeout=30
InactiveLimit=0
KillWait=5
MinJobAge=3600
ReturnToService=2
JobRequeue=1
{requeue_exit}
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PropagateResourceLimitsExcept=MEMLOCK
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=node[1-3] Default=YES MaxTime=INFINITE PriorityTier=1 \
PreemptMode=REQUEUE GraceTime=10
PartitionName=urgent Nodes=node[1-3] MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""


class NoSlurmError(Exception):
    """Slurm is not installed, or does not start here."""


def missing() -> list[str]:
    """Return the programs that are not installed."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


@dataclass(frozen=True, slots=True)
class Task:
    """One task of an array, or a job of its own, as the controller knows it."""

    id: int
    state: str
    reason: str
    restarts: int
    node: str


@dataclass(slots=True)
class SlurmCluster:
    """The daemons, and the commands of a client."""

    workdir: Path
    has_requeue_exit: bool = True  # what an admin may have set, or not
    _folder: Path = field(init=False)
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> SlurmCluster:
        if absent := missing():
            raise NoSlurmError(f"not installed: {', '.join(absent)}")
        self._folder = self.workdir / "slurm"
        self._write_config()
        try:
            self._start_daemons()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs to find this Slurm."""
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        mine = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
        return {**mine, "SLURM_CONF": str(self._folder / "slurm.conf"), "PATH": path}

    def call(self, *words: str, text: str | None = None, cwd: Path | None = None) -> str:
        """Run a client's command and return what it prints; CalledProcessError if it fails."""
        done = subprocess.run(
            words,
            input=text,
            text=True,
            capture_output=True,
            env=self.environment,
            cwd=cwd or self.workdir,
            timeout=120,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def tasks(self, job: str) -> list[Task]:
        """Return all tasks of an array, or the one of a job."""
        found = []
        for line in self.call("scontrol", "show", "job", "--oneliner", job).splitlines():
            values = dict(re.findall(r"(\w+)=(\S*)", line))
            found.append(
                Task(
                    id=int(values.get("ArrayTaskId", "0").partition("-")[0] or 0),
                    state=values["JobState"],
                    reason=values.get("Reason", ""),
                    restarts=int(values.get("Restarts", "0")),
                    node=values.get("NodeList", ""),
                )
            )
        return sorted(found, key=lambda task: task.id)

    def workers_on(self, node: str) -> list[int]:
        """Return the processes of jobs on a node."""
        return [
            pid
            for pid in _processes()
            if (found := _environment_of(pid)).get("SLURMD_NODENAME") == node
            and found.get("SLURM_CONF") == str(self._folder / "slurm.conf")
        ]

    def power_off(self, node: str) -> None:
        """Kill a node's daemon, its step daemons and all that runs on it, at once."""
        workers = self.workers_on(node)
        parents = {_parent(pid) for pid in workers}
        daemons = [pid for pid in parents if pid > 1 and "slurmstepd" in _name(pid)]
        for pid in [self._daemons[f"slurmd-{node}"].pid, *daemons, *workers]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._daemons.pop(f"slurmd-{node}").wait()

    def power_on(self, node: str) -> None:
        """Start a node's daemon."""
        self._start(f"slurmd-{node}", "slurmd", "-D", "-N", node)

    def stop(self) -> None:
        """End all jobs and daemons."""
        if "slurmctld" in self._daemons:
            with contextlib.suppress(Exception):
                self.call("scancel", "--full", "--signal=KILL", "--state=RUNNING", "--user=root")
        for node in NODES:
            for pid in self.workers_on(node):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()

    def _write_config(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self._folder / name).mkdir(parents=True)
        self._folder.chmod(0o755)
        (self._folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (self._folder / "munge.key").chmod(0o600)
        host = socket.gethostname().partition(".")[0]
        ports = _free_ports(1 + len(NODES))
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
            "CPUs=2 RealMemory=1000 State=UNKNOWN"
            for node, port in zip(NODES, ports[1:], strict=True)
        ]
        config = CONFIG.format(
            host=host,
            port=ports[0],
            user=_user(),
            folder=self._folder,
            requeue_exit="RequeueExit=75" if self.has_requeue_exit else "",
            nodes="\n".join(nodes),
        )
        (self._folder / "slurm.conf").write_text(config)

    def _start_daemons(self) -> None:
        folder = self._folder
        self._start(
            "munged",
            "munged",
            "--foreground",
            f"--key-file={folder}/munge.key",
            f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid",
            f"--seed-file={folder}/munged.seed",
            f"--log-file={folder}/munged.log",
            "--num-threads=2",
        )
        _wait_for(lambda: (folder / "munge.socket").exists(), "munged")
        self._start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            self.power_on(node)
        _wait_for(lambda: self._num_idle() == len(NODES), "three idle nodes")

    def _num_idle(self) -> int:
        try:
            return int(self.call("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D") or 0)
        except (RuntimeError, ValueError):
            return 0

    def _start(self, name: str, *words: str) -> None:
        with (self._folder / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                words, stdout=log, stderr=log, env=self.environment, start_new_session=True
            )


def _wait_for(is_there: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + START_SECONDS
    while not is_there():
        if time.monotonic() > end:
            raise NoSlurmError(f"waited {START_SECONDS:.0f} s for {what}")
        time.sleep(0.1)


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment_of(pid: int) -> dict[str, str]:
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (part.partition(b"=") for part in data.split(b"\0"))
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, _, value in pairs}


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
