"""A job inside WireGuard: nothing listens on the cable, which carries WireGuard's packets alone."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_two_machines import LIMIT_S, expected_results, train_on_both

from machines import ADDRESSES, SYSTEM, ip
from patience import wait_until

INSIDE = ("evenstep-a-in", "evenstep-b-in")
INSIDE_ADDRESSES = ("10.213.79.1", "10.213.79.2")
PORT = 51820

# Prints each new kind of packet of the cable: of IP its protocol and port, else the frame's type.
# And each socket that listens on it.
WATCH = """
import socket
from pathlib import Path
cable, seen = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)), set()
cable.bind(("eth0", 0))
while True:
    frame = cable.recv(1 << 16)
    kind = frame[12:14].hex()
    if kind == "0800":
        ends = {int.from_bytes(frame[at : at + 2], "big") for at in (34, 36)}
        kind = f"ip {frame[23]} {min(ends)}"
    tables = "".join(Path(f"/proc/net/{one}").read_text() for one in ("tcp", "tcp6"))
    for new in {kind, *(["listens"] if " 0A " in tables else [])} - seen:
        seen.add(new)
        print(new, flush=True)
"""


def wireguard(machine, *arguments, **options):
    return subprocess.run(
        ["ip", "netns", "exec", machine, *map(str, arguments)], check=True, text=True, **options
    )


@contextlib.contextmanager
def tunnel(machines, folder):
    """Put an end of a WireGuard tunnel, `wg0`, into a namespace of its own on each machine."""
    if not (shutil.which("wg", path=SYSTEM) and shutil.which("wireguard-go", path=SYSTEM)):
        pytest.skip("wg and wireguard-go are not installed here")
    with contextlib.ExitStack() as opened:
        keys = []
        for machine, inside in zip(machines, INSIDE, strict=True):
            ip("netns", "del", inside, check=False)
            ip("netns", "add", inside)
            opened.callback(ip, "netns", "del", inside)
            daemon = subprocess.Popen(
                ["ip", "netns", "exec", machine, "wireguard-go", "-f", machine],
                env={**os.environ, "WG_PROCESS_FOREGROUND": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            opened.callback(daemon.wait, 60)
            opened.callback(daemon.terminate)
            key = subprocess.check_output(["wg", "genkey"], text=True)
            (folder / machine).touch(0o600)
            (folder / machine).write_text(key)
            keys.append(subprocess.check_output(["wg", "pubkey"], input=key, text=True).strip())
        for number, (machine, inside) in enumerate(zip(machines, INSIDE, strict=True)):
            other = 1 - number
            peer = ("peer", keys[other], "endpoint", f"{ADDRESSES[other]}:{PORT}")
            allowed = ("allowed-ips", f"{INSIDE_ADDRESSES[other]}/32")
            own = ("listen-port", PORT, "private-key", folder / machine)
            wait_until(Path(f"/var/run/wireguard/{machine}.sock").exists)
            wireguard(machine, "wg", "set", machine, *own, *peer, *allowed)
            ip("-n", machine, "link", "set", machine, "netns", inside, "name", "wg0")
            ip("-n", inside, "addr", "add", f"{INSIDE_ADDRESSES[number]}/24", "dev", "wg0")
            for name in ("lo", "wg0"):
                ip("-n", inside, "link", "set", name, "up")
        yield


@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT_S + 120)
def test_a_job_inside_wireguard_is_on_no_other_network(machines, tmp_path):
    expected = expected_results(tmp_path / "alone")
    with tunnel(machines, tmp_path):
        watch = ["ip", "netns", "exec", machines[0], sys.executable, "-c", WATCH]
        watching = subprocess.Popen(watch, stdout=subprocess.PIPE, text=True)
        try:
            found = train_on_both(INSIDE, tmp_path, INSIDE_ADDRESSES, "wg0")
        finally:
            watching.terminate()
            seen, _ = watching.communicate()
    assert found == [expected] * 2
    assert f"ip 17 {PORT}" in seen.split("\n")
    others = {*seen.split("\n")} - {f"ip 17 {PORT}", "0806", "86dd", ""}  # ARP, and IPv6's own
    assert not others
