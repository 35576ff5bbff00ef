"""A real Slurm on two machines that network namespaces play, and nothing of it left behind."""

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import time

import pytest

from machines import ADDRESSES, SYSTEM, name_hosts, on_host

PATIENCE_S = 400  # the first start of a job takes a minute on a busy machine
HOSTS = ("n1", "n2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "srun")

# A node has more processors than this machine, so that jobs of any page fit. Jobs of the partition
# `urgent` have those of the other one end and wait in the queue again.
_SETTINGS = """
ClusterName=evenstep
SlurmctldHost={hosts[0]}({addresses[0]})
SlurmUser=root
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=60
SchedulerParameters=sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={hosts[0]} NodeAddr={addresses[0]} CPUs=16
NodeName={hosts[1]} NodeAddr={addresses[1]} CPUs=16
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


class Slurm:
    """A cluster of two nodes. Every command of it runs on the first one."""

    def __init__(self, machines, folder):
        self._folder = folder
        self._on = [on_host(machine, host) for machine, host in zip(machines, HOSTS, strict=True)]
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._environment["PATH"] = SYSTEM
        self._daemons = []

    def start(self, node, *command):
        log = (self._folder / f"{command[0]}-{HOSTS[node]}.log").open("w")
        with log:
            daemon = subprocess.Popen(
                [*self._on[node], *command], env=self._environment, stdout=log, stderr=log
            )
        self._daemons.append(daemon)

    def run(self, *command, **variables):
        """Run a command and return what it prints."""
        finished = subprocess.run(
            [*self._on[0], *map(str, command)],
            env={**self._environment, **variables},
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    def submit(self, *options, **variables):
        """Submit a job; return its number."""
        return self.run("sbatch", "--parsable", *options, **variables).strip()

    def state(self, job):
        """Return the state of a job, such as RUNNING."""
        return re.search(r"JobState=(\w+)", self.run("scontrol", "show", "job", job))[1]

    def wait_until(self, condition):
        """Look a few times a second whether `condition()` holds; each look may start a process."""
        ends_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < ends_s, "it never came to be"
            time.sleep(0.2)

    def starts_again(self, job):
        """Wait until a job that ran is in the queue, and let it start now, not in two minutes."""
        self.wait_until(lambda: self.state(job) == "PENDING")
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def ended(self, job):
        """Wait until a job has ended; return its state."""
        self.wait_until(lambda: self.state(job) not in ("PENDING", "RUNNING", "COMPLETING"))
        return self.state(job)

    def end(self):
        with contextlib.suppress(AssertionError, subprocess.SubprocessError):
            self.run("scancel", "--full", "--signal=KILL", "--user", "root")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(60)


@contextlib.contextmanager
def slurm_on(machines, folder):
    """Start a cluster on two machines; every process of it has ended at the end."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=SYSTEM) is None]
    if missing:
        pytest.skip(f"Slurm is not installed here: {', '.join(missing)}")
    name_hosts(HOSTS)
    settings = _SETTINGS.format(hosts=HOSTS, addresses=ADDRESSES, folder=folder)
    (folder / "slurm.conf").write_text(settings)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # not looked for: none is used
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    munge = [f"--{one}-file={folder}/munge.{one}" for one in ("key", "pid", "log", "seed")]
    cluster = Slurm(machines, folder)
    try:
        cluster.start(0, "munged", "--foreground", "--force", f"--socket={folder}/munge", *munge)
        cluster.start(0, "slurmctld", "-D")
        for node, host in enumerate(HOSTS):
            cluster.start(node, "slurmd", "-D", "-N", host)
        cluster.wait_until(
            lambda: cluster.run("sinfo", "-h", "-o", "%D %t").split() == ["2", "idle"]
        )
        yield cluster
    finally:
        cluster.end()
