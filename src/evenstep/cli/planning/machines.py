"""The machine of a plan: read from a file, or measured by `evenstep doctor --measure`."""

from __future__ import annotations

import dataclasses
import json
import math
import socket
import statistics
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from evenstep.bench.workload import Job
from evenstep.cli.planning.measuring import measured_machine
from evenstep.errors import InputError
from evenstep.planning import Link, Machine

_MOST_BYTES = 1 << 16
_MOST_SLOWDOWNS = 1024
_PINGS, _SENT_NBYTES = 200, 64 << 20
_FIX = "give a file that `evenstep doctor --measure --json` wrote"


def described_machine(per_machine: int | None) -> Machine:
    """Return a machine of which nothing was measured."""
    return Machine(devices=per_machine or 1)


def measure_machine(*, as_json: bool) -> None:
    """Print what this machine adds to a step on several devices (`evenstep doctor --measure`)."""
    job = Job(network="lenet", examples=256, warmup_steps=1, steps=1, memory_format="preserve")
    machine = dataclasses.replace(measured_machine(job), local=loopback())
    if as_json:
        known = {key: value for key, value in to_json(machine).items() if value is not None}
        click.echo(json.dumps({"machine": known}, allow_nan=False))
        return
    click.echo(f"devices            {machine.devices}")
    for count, slowed in enumerate(machine.slowdown[1:], 2):
        click.echo(f"{count} devices at once  a shard of LeNet takes {slowed:.2f} times as long")
    click.echo(
        f"copies             {machine.copied_bytes_per_s / 1e9:.1f} GB/s by one process of two"
    )
    if machine.meeting_s:
        click.echo(f"meeting            {machine.meeting_s * 1e6:.0f} us, of two devices in slices")
    link = machine.local
    rate, latency_us = link.bytes_per_s / 1e9, link.latency_s * 1e6
    click.echo(f"loopback           {rate:.1f} GB/s, {latency_us:.0f} us of latency")
    click.echo("")
    click.echo("evenstep plan --machine FILE takes what --json prints")


def loopback() -> Link:
    """Return the rate and the latency of this machine's loopback, through plain sockets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        echo = threading.Thread(target=_echo, args=(server,))
        echo.start()
        with socket.create_connection(server.getsockname()) as own:
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips_s = []
            for _ in range(_PINGS):
                began_s = time.perf_counter()
                own.sendall(b"x")
                own.recv(1)
                trips_s.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            own.sendall(bytes(_SENT_NBYTES))
            own.recv(1)
            took_s = time.perf_counter() - began_s
        echo.join()
    return Link(bytes_per_s=_SENT_NBYTES / took_s, latency_s=statistics.median(trips_s) / 2)


def _echo(server: socket.socket) -> None:
    """Answer each ping, and then all of the bytes with one."""
    other, _ = server.accept()
    with other:
        other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_PINGS):
            other.recv(1)
            other.sendall(b"x")
        missing = _SENT_NBYTES
        while missing:
            missing -= len(other.recv(min(missing, 1 << 20))) or missing
        other.sendall(b"x")


def to_json(machine: Machine) -> dict[str, Any]:
    """Return a machine as a JSON object, without what is infinite."""
    return {
        name: to_json(value) if isinstance(value, Link) else value  # type: ignore[arg-type]
        for name, value in (
            (field.name, getattr(machine, field.name)) for field in dataclasses.fields(machine)
        )
        if not (isinstance(value, float) and math.isinf(value))
    }


def read_machine(file: Path) -> Machine:
    """Return the machine that a file describes.

    Raises:
        InputError: the file can't be read, or describes no machine.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        return _machine(json.loads(content)["machine"])
    except OSError as error:
        raise InputError(f"{file} could not be read ({error.strerror}): {_FIX}") from None
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{file} describes no machine ({error}): {_FIX}") from None


def _machine(fields: Mapping[str, Any]) -> Machine:
    _refuse_unknown(fields, Machine)
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if name in ("local", "network"):
            _refuse_unknown(value, Link)
            link = {key: _number(one) for key, one in value.items() if key != "shared"}
            values[name] = Link(shared=value.get("shared") is True, **link)
        elif name in ("slowdown", "process_slowdown"):
            values[name] = tuple(_number(one, 1) for one in value[:_MOST_SLOWDOWNS]) or (1.0,)
        elif name == "devices":
            values[name] = int(_number(value, 1, 1024))
        elif name == "has_own_memory":
            values[name] = value is True
        else:
            values[name] = _number(value)
    return Machine(**values)


def _refuse_unknown(fields: Mapping[str, Any], kind: type[Machine] | type[Link]) -> None:
    known = {one.name for one in dataclasses.fields(kind)}
    if strange := sorted(set(fields) - known):
        raise ValueError(f"unknown: {', '.join(map(repr, strange))[:100]}")


def _number(value: Any, least: float = 0, most: float = 1e18) -> float:
    if isinstance(value, bool | str) or not least <= float(value) <= most:
        raise ValueError(f"{value!r:.40} is not a number from {least:g} to {most:g}")
    return float(value)
