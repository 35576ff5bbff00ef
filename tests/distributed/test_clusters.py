"""The recipes of docs/clusters.md, run unchanged on two machines that namespaces play."""

import contextlib
import functools
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from commands import steps_kept, trained
from machines import ADDRESSES, NAMES, SYSTEM, name_hosts, on_host
from slurm import slurm_on

yaml = pytest.importorskip("yaml")
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
    job = yaml.safe_load(recipe("Kubernetes"))
    name, policy = job["metadata"]["name"], job["spec"]["elasticPolicy"]
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert worker["replicas"] == policy["maxReplicas"] == len(NAMES)
    assert container["name"] == "pytorch"  # where the operator puts its variables
    pods = [f"{name}-worker-{number}" for number in range(worker["replicas"])]
    name_hosts(pods)
    (tmp_path / "secret").write_text("a secret that nobody knows")
    at = {"/job/secret": str(tmp_path / "secret")}
    words = [word.replace("/runs", str(tmp_path)) for word in container["command"]]
    operator = {
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ID": policy["rdzvId"],
        "PET_RDZV_ENDPOINT": f"{pods[0]}:23456",
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PATH": TOOLS,
    } | {one["name"]: at.get(one["value"], one["value"]) for one in container["env"]}
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


def test_what_the_file_for_kubernetes_refers_to_is_in_it():
    job = yaml.safe_load(recipe("Kubernetes"))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    mounted = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert {*mounted} == {one["name"] for one in pod["volumes"]}
    (secret,) = [one["secret"] for one in pod["volumes"] if "secret" in one]
    made = re.search(r"secret generic (\w+) --from-literal=(\w+)=", PAGE.read_text())
    assert secret == {"secretName": made[1], "defaultMode": 0o400}
    given = {one["name"]: one["value"] for one in container["env"]}
    assert given["EVENSTEP_SECRET_FILE"] == f"{mounted['job']}/{made[2]}"
    assert container["command"][-4].startswith(f"{mounted['runs']}/")
    promised = re.search(r"it has (\d+) s\nfor that", PAGE.read_text())[1]
    assert pod["terminationGracePeriodSeconds"] == int(promised)


@contextlib.contextmanager
def ssh_between(machines, folder):
    """Start an sshd on each machine; yield a folder with an `ssh` that all of them let in."""
    daemon = shutil.which("sshd", path=SYSTEM)
    if daemon is None or shutil.which("ssh") is None:
        pytest.skip("ssh and sshd are not installed here")
    for name in ("host", "user"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name]
        subprocess.run(make, check=True)
    settings = {
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "user.pub",
        "StrictModes": "no",
        "PermitRootLogin": "yes",
        "PidFile": "none",
        "SetEnv": f"PATH={TOOLS} PYTHONPATH={os.environ.get('PYTHONPATH', '')}",
    }
    (folder / "sshd_config").write_text("".join(f"{k} {v}\n" for k, v in settings.items()))
    (folder / "ssh").write_text(
        f"#!/bin/bash\nexec {shutil.which('ssh')} -i {folder}/user -o StrictHostKeyChecking=no "
        f'-o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "$@"\n'
    )
    (folder / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)  # where it locks its children in
    daemons = [
        subprocess.Popen(["ip", "netns", "exec", one, daemon, "-D", "-f", folder / "sshd_config"])
        for one in machines
    ]
    try:
        yield folder
    finally:
        for one in daemons:
            one.terminate()
            one.wait(60)


@pytest.mark.exhaustive
@pytest.mark.timeout(4 * LIMIT_S)
def test_machines_that_ssh_reaches(machines, tmp_path):
    (tmp_path / "machines.sh").write_text(recipe("Machines that ssh reaches"))
    with ssh_between(machines, tmp_path) as tools:
        script = [tmp_path / "machines.sh", tmp_path / "run", *ADDRESSES]
        finished = subprocess.run(
            ["ip", "netns", "exec", machines[0], "bash", *script],
            env={**os.environ, "PATH": f"{tools}:{TOOLS}:{SYSTEM}"},
            capture_output=True,
            text=True,
            timeout=2 * LIMIT_S,
            check=False,
        )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", finished.stdout)  # it has a terminal there
    assert {*re.findall(r"\b[0-9a-f]{64}\b", plain)} == undisturbed(), finished.stdout[-2000:]
