"""Two machines, played by network namespaces with a link between them."""

import json
import os
import re
import subprocess
import sys

import pytest

from commands import MLP, steps_kept, trained
from evenstep.cli.training.record import TrainRecord
from launched import JOBS, alone
from machines import ADDRESSES, ip
from patience import wait_until
from slow_cable import slow_cable

SLOW_ADDRESSES = ("10.213.78.1", "10.213.78.2")
LIMIT_S = 300  # each step waits for a slow cable several times


def torchrun_on(
    machine, number, *job, nnodes="2", rendezvous="", addresses=ADDRESSES, interface="eth0"
):
    """Start torchrun on a machine as docs/clusters.md says."""
    inside = ("ip", "netns", "exec", machine, sys.executable)
    torchrun = (
        f"-m torch.distributed.run --nnodes {nnodes} --nproc-per-node 1 --rdzv-backend c10d "
        f"--rdzv-endpoint {addresses[0]}:29511 --rdzv-id test --local-addr {addresses[number]} "
        f"--rdzv-conf is_host={int(number == 0)}{rendezvous} --max-restarts {int(nnodes != '2')}"
    )
    return subprocess.Popen(
        [*inside, *torchrun.split(), *map(str, job)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": interface},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def train_on_both(machines, out, addresses=ADDRESSES, interface="eth0"):
    job, network = (
        (JOBS / "same.py", out, "1,1", 8, 1),
        {"addresses": addresses, "interface": interface},
    )
    running = [
        torchrun_on(machine, number, *job, **network) for number, machine in enumerate(machines)
    ]
    try:
        output = [process.communicate(timeout=LIMIT_S) for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert [process.returncode for process in running] == [0, 0], output
    return [json.loads((out / f"{rank}.json").read_text())["results"] for rank in range(2)]


def expected_results(out):
    out.mkdir()
    finished = alone("same.py", out, "1", 8, 1)
    assert finished.returncode == 0, finished.stderr
    return json.loads((out / "0.json").read_text())["results"]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_two_machines_give_what_one_gives(machines, tmp_path):
    expected = expected_results(tmp_path / "alone")
    assert train_on_both(machines, tmp_path) == [expected] * 2


@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT_S + 60)
def test_a_slow_cable_that_loses_packets_changes_nothing(machines, tmp_path):
    expected = expected_results(tmp_path / "alone")
    with slow_cable(machines, SLOW_ADDRESSES, delay_s=0.05, loss=0.01) as cable:
        found = train_on_both(machines, tmp_path, SLOW_ADDRESSES, "slow0")
    assert found == [expected] * 2
    assert cable.lost > 0.005 * cable.carried > 0


def dropped_packets(machine):
    output = ip("netns", "exec", machine, "tc", "-s", "qdisc", "show", "dev", "eth0").stdout
    return int(re.search(r"dropped (\d+)", output)[1])


@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT_S + 60)
def test_a_narrow_cable_that_drops_packets_changes_nothing(machines, tmp_path):
    """A token bucket with a queue of a few packets: excess packets are lost and sent again."""
    for machine in machines:
        bucket = ["root", "tbf", "rate", "40mbit", "burst", "4kb", "limit", "8kb"]
        add = ("tc", "qdisc", "add", "dev", "eth0", *bucket)
        if ip("netns", "exec", machine, *add, check=False).returncode:
            pytest.skip("tc tbf is not permitted here")
    expected = expected_results(tmp_path / "alone")
    assert train_on_both(machines, tmp_path) == [expected] * 2
    assert all(dropped_packets(machine) > 0 for machine in machines)


@pytest.mark.slow
def test_a_cut_cable_is_noticed_on_both_sides_within_the_time_limit(machines, tmp_path):
    running = [
        torchrun_on(machine, number, JOBS / "fail.py", tmp_path, "cut cable")
        for number, machine in enumerate(machines)
    ]
    try:
        wait_until((tmp_path / "cut").exists)
        ip("-n", machines[1], "link", "set", "eth0", "down")
        wait_until(lambda: all((tmp_path / f"{rank}.txt").exists() for rank in range(2)))
    finally:
        for process in running:
            process.kill()
            process.communicate()
    for rank in range(2):
        text = (tmp_path / f"{rank}.txt").read_text()
        assert f"PeerError: rank {1 - rank} did not respond within 3 s" in text


@pytest.mark.slow
def test_the_side_with_the_rendezvous_continues_alone_to_the_same_result(machines, tmp_path):
    job = [*MLP, "--steps", 900, "--devices", 1]
    undisturbed = trained(*job).fingerprint
    runs, record = tmp_path / "runs", tmp_path / "record.json"
    job += ["--checkpoint-dir", runs, "--checkpoint-every", 20, "--timeout", 3, "--json", record]
    running = []
    for number, machine in enumerate(machines):
        # How long the kernel tries to reach a lost machine, some 25 s: torch's launcher waits for
        # it, and would end a process that has not said yet that the other one is lost.
        ip("netns", "exec", machine, "sysctl", "-qw", "net.ipv4.tcp_retries2=6")
        wait = ",last_call_timeout=4,read_timeout=30"
        command = ["-m", "evenstep", "train", *job]
        running.append(torchrun_on(machine, number, *command, nnodes="1:2", rendezvous=wait))
    stays, goes = running
    try:
        wait_until(lambda: max(steps_kept(runs), default=0) >= 40)
        ip("-n", machines[1], "link", "set", "eth0", "down")
        _, output = goes.communicate(timeout=90)
        assert goes.returncode
        assert "evenstep: rank 0" in output
        _, errors = stays.communicate(timeout=90)
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert stays.returncode == 0, errors
    assert "rank 1" in errors
    assert TrainRecord.from_json(record.read_text()).fingerprint == undisturbed
