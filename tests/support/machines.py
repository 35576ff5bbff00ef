"""Two machines, played by network namespaces with a cable between them."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NAMES = ("evenstep-a", "evenstep-b")
ADDRESSES = ("10.213.77.1", "10.213.77.2")
LOCK = Path(tempfile.gettempdir()) / "evenstep-two-machines.lock"


SYSTEM = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where ip, tc and sysctl may be


def ip(*arguments, check=True):
    command = [shutil.which("ip", path=SYSTEM), *arguments]
    environment = {**os.environ, "PATH": SYSTEM}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=check)


def tear_down():
    for name in NAMES:
        ip("netns", "del", name, check=False)
        shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


@contextlib.contextmanager
def two_machines():
    """Two namespaces with a veth pair; their cable is `eth0` in each."""
    if shutil.which("ip", path=SYSTEM) is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the ip command")
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one pair at a time on this machine
        yield from _joined_machines()


def _joined_machines():
    tear_down()
    if ip("netns", "add", NAMES[0], check=False).returncode:
        pytest.skip("network namespaces are not permitted here")
    try:
        ip("netns", "add", NAMES[1])
        ends = [("eth0", "netns", name) for name in NAMES]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield NAMES
    finally:
        tear_down()


@contextlib.contextmanager
def machines_at_a_switch(count, rate):
    """So many namespaces, each with a cable `eth0` of that rate to a switch; yields their names."""
    bucket = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
    with two_machines(), contextlib.ExitStack() as added:
        switch, names = "evenstep-switch", [f"evenstep-{number}" for number in range(count)]
        for name in (switch, *names):
            ip("netns", "del", name, check=False)
            ip("netns", "add", name)
            added.callback(ip, "netns", "del", name, check=False)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(names):
            ends = [("eth0", "netns", name), (f"port{number}", "netns", switch)]
            ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            ip("-n", switch, "link", "set", f"port{number}", "master", "br0", "up")
            ip("-n", name, "addr", "add", f"{at_the_switch(number)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            for place, device in ((name, "eth0"), (switch, f"port{number}")):
                ip("netns", "exec", place, "tc", "qdisc", "add", "dev", device, *bucket)
        yield names


def at_the_switch(number):
    """Return the address of a machine at a switch."""
    return f"10.213.79.{1 + number}"


def name_hosts(names):
    """Let both machines know each other by names."""
    lines = [f"{address} {name}" for address, name in zip(ADDRESSES, names, strict=True)]
    for machine in NAMES:
        folder = Path("/etc/netns") / machine  # what `ip netns exec` puts over /etc
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))


def on_host(machine, name):
    """Return what runs a command on a machine whose host has that name."""
    rename = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]
    return ["ip", "netns", "exec", machine, *rename]
