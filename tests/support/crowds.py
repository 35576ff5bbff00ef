"""Trains with `jobs/crowd.py` in many processes; returns what each of them took and held."""

import json
from pathlib import Path

from launched import apart
from machines import at_the_switch, machines_at_a_switch

LIMIT_S = 500


def on_machines(out, sizes, rate, *arguments):
    """Train with so many processes on each machine; return the figures of each process."""
    with machines_at_a_switch(len(sizes), rate) as names:
        places = [
            (name, local) for name, size in zip(names, sizes, strict=True) for local in range(size)
        ]
        meeting = {"MASTER_ADDR": at_the_switch(0), "MASTER_PORT": "29511"}
        meeting |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "GLOO_SOCKET_IFNAME": "eth0"}
        given = [{**meeting, "LOCAL_RANK": str(local)} for _, local in places]
        within = [("ip", "netns", "exec", name) for name, _ in places]
        job = ("crowd.py", out, *arguments)
        ended = apart(*job, variables=given, within=within, timeout_s=LIMIT_S)
        assert [code for code, *_ in ended] == [0] * len(places), ended
    return figures(out, len(places))


def figures(out, processes):
    """Return the figures that each process has written."""
    return [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(processes)]
