"""The recipes of docs/clusters.md, run unchanged in two network namespaces."""

import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from commands import trained
from machines import NAMES, name_hosts, on_host

PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"
TOOLS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where torchrun is
LIMIT_S = 240


def recipe(heading):
    """Return the first block of code below a heading of the page."""
    section = PAGE.read_text().partition(f"## {heading}\n")[2]
    return re.search(r"```\w+\n(.*?)```", section, re.DOTALL)[1]


def fingerprints(text):
    return set(re.findall(r"^fingerprint +(\w{64})$", text, re.MULTILINE))


@functools.cache
def undisturbed():
    return {trained("--model", "lenet", "--data", "digits", "--devices", 1).fingerprint}


def stub(folder, name, text):
    file = folder / name
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)


@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT_S + 60)
def test_slurm(machines, tmp_path):
    """Stubs play `srun` and `scontrol`: they set variables, and run commands on each host."""
    hosts = ("n1", "n2")
    name_hosts(hosts)
    (tmp_path / "bin").mkdir()
    stub(tmp_path / "bin", "scontrol", "printf 'n1\\nn2\\n'")
    starts = [
        f'SLURM_NODEID={node} {shlex.join(on_host(machine, host))} "${{@:2}}" &'
        for node, (machine, host) in enumerate(zip(machines, hosts, strict=True))
    ]
    stub(tmp_path / "bin", "srun", "\n".join([*starts, "wait -n && wait -n"]))
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    slurm |= {"SLURM_SUBMIT_DIR": str(tmp_path), "PATH": f"{tmp_path / 'bin'}:{TOOLS}"}
    script = tmp_path / "job.sh"
    script.write_text(recipe("Slurm"))
    finished = subprocess.run(
        ["bash", script],
        env={**os.environ, **slurm},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert fingerprints(finished.stdout) == undisturbed()


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
