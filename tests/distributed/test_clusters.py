"""The recipes of docs/clusters.md, run unchanged on two machines that namespaces play."""

import functools
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from commands import steps_kept, trained
from machines import NAMES, SYSTEM, name_hosts, on_host
from slurm import slurm_on

PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"
TOOLS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where torchrun is
LENET = ("--model", "lenet", "--data", "digits")
LIMIT_S = 240


def recipe(heading, number=0):
    """Return a block of code below a heading of the page."""
    section = PAGE.read_text().partition(f"## {heading}\n")[2]
    return re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)[number]


def fingerprints(text):
    return set(re.findall(r"^fingerprint +(\w{64})$", text, re.MULTILINE))


@functools.cache
def undisturbed(*more):
    return {trained(*LENET, "--devices", 1, *more).fingerprint}


@pytest.fixture
def slurm(machines, tmp_path):
    with slurm_on(machines, tmp_path) as cluster:
        yield cluster


@pytest.mark.exhaustive
@pytest.mark.timeout(4 * LIMIT_S)
def test_slurm(slurm, tmp_path):
    """A job is told that its time is up, then preempted, and each time goes on from there."""
    longer = ("--steps", 400)
    script = recipe("Slurm").replace(
        "--auto-resume", f"--auto-resume {shlex.join(map(str, longer))}"
    )
    (tmp_path / "job.sh").write_text(script)
    job = slurm.submit("job.sh", PATH=f"{TOOLS}:{SYSTEM}")
    output = tmp_path / f"slurm-{job}.out"

    slurm.wait_until(lambda: "epoch " in output.read_text() if output.exists() else False)
    slurm.run("scancel", "--signal=USR1", "--batch", job)  # as --signal=B:USR1@120 does
    slurm.starts_again(job)
    saved = steps_kept(tmp_path / "runs" / job)
    assert saved
    began = len(output.read_text())
    slurm.wait_until(lambda: "epoch " in output.read_text()[began:])
    urgent = slurm.submit("--partition=urgent", "--exclusive", "--nodes=2", "--wrap", "srun true")
    slurm.starts_again(job)
    assert steps_kept(tmp_path / "runs" / job)[-1] > saved[-1]
    assert slurm.ended(urgent) == "COMPLETED"
    assert slurm.ended(job) == "COMPLETED", output.read_text()
    stops = re.findall(r"stopped after step (\d+) of 400", output.read_text())
    assert len({*stops}) == 2
    assert fingerprints(output.read_text()) == undisturbed(*longer)
    secret = tmp_path / "runs" / f"{job}.secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


@pytest.mark.exhaustive
@pytest.mark.timeout(4 * LIMIT_S)
def test_an_array_of_slurm(slurm, tmp_path):
    (tmp_path / "array.sh").write_text(recipe("Slurm", 1))
    job = slurm.submit("--array=0-1", "array.sh", PATH=f"{TOOLS}:{SYSTEM}")
    for seed in range(2):
        assert slurm.ended(f"{job}_{seed}") == "COMPLETED"
        found = fingerprints((tmp_path / f"slurm-{job}_{seed}.out").read_text())
        assert found == {trained(*LENET, "--seed", seed).fingerprint}


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_kubernetes(machines, tmp_path):
    """Namespaces play the pods, with their names and the variables of the training operator."""
    job = recipe("Kubernetes")
    name, replicas = re.search(r"name: (\w+)", job)[1], int(re.search(r"replicas: (\d+)", job)[1])
    assert replicas == len(NAMES)
    pods = [f"{name}-worker-{number}" for number in range(replicas)]
    name_hosts(pods)
    command = re.search(r"command: \[(.*?)\]", job, re.DOTALL)[1].replace("/runs", str(tmp_path))
    words = [word.strip().strip('"') for word in command.split(",")]
    policy = dict(re.findall(r"(rdzv\w+|min\w+|max\w+): (\w+)", job))
    operator = {
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ID": policy["rdzvId"],
        "PET_RDZV_ENDPOINT": f"{pods[0]}:23456",
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": policy["maxRestarts"],
        "GLOO_SOCKET_IFNAME": re.search(r"name: GLOO_SOCKET_IFNAME, value: (\w+)", job)[1],
        "PATH": TOOLS,
    }
    running = [
        subprocess.Popen(
            [*on_host(machine, pod), *words],
            env={**os.environ, **operator},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for machine, pod in zip(machines, pods, strict=True)
    ]
    finished = [process.communicate(timeout=LIMIT_S) for process in running]
    assert [process.returncode for process in running] == [0, 0], finished
    assert fingerprints("".join(out for out, _ in finished)) == undisturbed()
