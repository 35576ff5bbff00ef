"""Files that a command reads: of odd shape, without end, or of another program."""

import contextlib
import itertools
import json
import math
import os
import re
import threading

import pytest

from evenstep.cli.options.training import ExperimentOptions
from evenstep.cli.traces.advice import findings
from evenstep.cli.traces.timeline import timeline_page
from evenstep.cli.training.runfile import read_run_file, write_run_file
from evenstep.errors import CheckpointError, InputError
from evenstep.profiling.reader import read_trace
from fuzzing import limited
from odd_values import left_out, places, put
from traces import HandTrace

ODD_VALUES = {
    "null": None,
    "true": True,
    "negative": -1,
    "zero": 0,
    "fraction": 0.5,
    "huge": 10**400,
    "infinite": math.inf,
    "no number": math.nan,
    "text": "x",
    "empty text": "",
    "list": [],
    "object": {},
    "list of lists": [[[1]]],
    "up": "../../etc/passwd",
}


# ---- run.json


@pytest.fixture
def folder(tmp_path):
    write_run_file(tmp_path, ExperimentOptions(data_dir="data", epochs=2))
    return tmp_path


def refused_run(folder, text):
    (folder / "run.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=r"run\.json (is damaged|can't be read)") as caught:
        read_run_file(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "[]",
        "[" * 100_000,
        '{"format": "evenstep run"}',
        '{"format": ["evenstep run"]}',
        "9" * 10_000,
        "{}" * 2,
        b"\xff\xfe",
        b"\0" * 100,
    ],
    ids=lambda text: str(text)[:12],
)
def test_a_run_file_of_odd_shape_is_refused(folder, text):
    refused_run(folder, text)


FITTING = {
    ("data_dir", "null"),
    ("data_dir", "text"),
    ("data_dir", "empty text"),
    ("data_dir", "up"),
    ("model", "text"),
    ("model", "empty text"),
    ("model", "up"),
    ("drop_last", "true"),
    ("lr", "zero"),
    ("lr", "fraction"),
    ("momentum", "zero"),
    ("momentum", "fraction"),
    ("epochs", "null"),
    ("steps", "null"),
}


@pytest.mark.parametrize("name", ODD_VALUES)
def test_a_run_file_holds_what_the_command_line_would_take(folder, name):
    whole = json.loads((folder / "run.json").read_text())
    del whole["sha256"]  # as version 0.1.0 wrote it
    for key in whole:
        if name == "huge" and key in ("batch_size", "epochs", "steps"):
            continue  # the largest number is not this file's concern
        text = json.dumps({**whole, key: ODD_VALUES[name]})
        if (key, name) in FITTING:
            (folder / "run.json").write_text(text)
            read_run_file(folder)
        else:
            refused_run(folder, text)


@pytest.mark.parametrize("key", ["devices", "checkpoint_dir", "json_file", "seed", "shards"])
def test_a_run_file_gives_no_other_option(folder, key):
    whole = json.loads((folder / "run.json").read_text())
    del whole["sha256"]
    refused_run(folder, json.dumps({**whole, key: 1}))


def test_a_run_file_without_end_is_refused_at_once(folder):
    os.truncate(folder / "run.json", 1 << 40)
    with pytest.raises(CheckpointError, match=r"can't be read \(it has more than 1,048,576 bytes"):
        read_run_file(folder)
    (folder / "run.json").unlink()
    os.mkfifo(folder / "run.json")
    with pytest.raises(CheckpointError, match=r"can't be read \(it is not a regular file"):
        read_run_file(folder)


# ---- traces


@pytest.fixture(scope="module")
def document():
    hand = HandTrace("cpu:0", "cpu:1")
    hand.load(1)
    hand.add((1, 2), (2, (1, "stolen")), wait=1.0, sums=(0.5, 0.5))
    return hand.trace.to_json()


def read(tmp_path, text):
    (tmp_path / "trace.json").write_text(text)
    return read_trace(tmp_path / "trace.json")


@pytest.mark.parametrize("name", ODD_VALUES)
@pytest.mark.thinned(3)
def test_a_trace_with_an_odd_value_anywhere_is_refused_or_counted(tmp_path, document, name):
    odd = json.dumps(ODD_VALUES[name])
    for path in [(), *places(document)]:
        text = json.dumps(put(document, path, "HERE")).replace('"HERE"', odd)
        try:
            account, events = read(tmp_path, text)
        except InputError as error:
            assert "\n" not in str(error)  # noqa: PT017
        else:
            drawn = re.findall(r' (?:x|x1|width)="(.+?)"', timeline_page(account, events, []))
            assert drawn, path
            assert all(math.isfinite(float(one)) for one in drawn), path
            shown = [account.wall_s, account.load_s, account.between_s, account.copy_s]
            assert all(math.isfinite(value) and value >= 0 for value in shown), path
            assert account.dropped >= 0, path
            assert all(finding.text for finding in findings(account))


def complaint_about(tmp_path, text):
    try:
        read(tmp_path, text)
    except InputError as error:
        return str(error)
    return ""


def test_a_trace_that_lacks_any_value_is_refused_or_counted(tmp_path, document):
    for path in places(document):
        assert "\n" not in complaint_about(tmp_path, json.dumps(left_out(document, path)))


def test_a_trace_without_end_is_refused_at_once(tmp_path):
    path = tmp_path / "trace.json"
    path.touch()
    os.truncate(path, 1 << 40)
    for name in (path, "/dev/zero"):
        with (
            limited("a trace of zeros"),
            pytest.raises(InputError, match=r"no JSON object \('\\x00' where '\{' is needed\)"),
        ):
            read_trace(name)


def event(**values):
    return json.dumps(
        {"name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "steps"}, **values}
    )


ROW, SPAN = event(ph="M"), event(ph="X", cat="step", ts=0, dur=5)
EVENTS = f'{{"traceEvents": [{ROW}'
TOO_LONG = "could not be read (it has more than 134,217,728 bytes)"
TOO_MANY = "more than 250,000 events, 10,000 rows or 100 keys"
ENDLESS = {
    "spaces": (lambda: itertools.repeat(" " * 4096), TOO_LONG),
    "one key": (
        lambda: itertools.chain(['{"a": 0'], itertools.repeat(', "a": 0')),
        "key 'a' twice",
    ),
    "keys": (lambda: itertools.chain("{", (f'"{n}": 0, ' for n in itertools.count())), TOO_MANY),
    "one row": (lambda: itertools.chain([EVENTS], itertools.repeat(f", {ROW}")), TOO_MANY),
    "spans": (lambda: itertools.chain([EVENTS], itertools.repeat(f", {SPAN}")), TOO_MANY),
    "rows": (
        lambda: itertools.chain([EVENTS], (f", {event(ph='M', tid=n)}" for n in itertools.count())),
        TOO_MANY,
    ),
    "an event": (lambda: itertools.chain([EVENTS, ", [0"], itertools.repeat(", []")), "no JSON ("),
    "a string": (lambda: itertools.chain(['{"a": "'], itertools.repeat("a" * 4096)), "no JSON ("),
    "a number": (lambda: itertools.chain(['{"a": 1'], itertools.repeat("1" * 4096)), "no JSON ("),
}
LONG = ("spaces", "one row", "spans")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in ENDLESS],
)
def test_a_trace_without_end_takes_little_memory(tmp_path, name):
    """It was read up to 256 MiB, which take far more as objects."""
    parts, line = ENDLESS[name]
    os.mkfifo(tmp_path / "pipe")

    def write():
        with contextlib.suppress(BrokenPipeError), (tmp_path / "pipe").open("w") as pipe:
            pipe.writelines(parts())

    writer = threading.Thread(target=write)
    writer.start()
    with limited(name), pytest.raises(InputError) as caught:
        read_trace(tmp_path / "pipe")
    writer.join()
    assert line in str(caught.value)


@pytest.mark.slow
def test_a_full_trace_takes_little_memory(tmp_path):
    hand = HandTrace("cpu:0", "cpu:1")
    while not hand.trace.dropped:
        hand.load(1)
        hand.add((1, 2, 1, 1), (2, (1, "stolen"), 1, 1), wait=1.0, sums=(0.5, 0.5))
    hand.trace.save(tmp_path / "trace.json")
    with limited("a full trace"):
        assert read_trace(tmp_path / "trace.json")[0].dropped > 0


def test_a_trace_may_come_through_a_pipe(tmp_path, document):
    """As of `evenstep explain <(zcat run.trace.gz)`."""
    os.mkfifo(tmp_path / "pipe")
    text = json.dumps(document)
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_text(text))
    writer.start()
    assert read_trace(tmp_path / "pipe")[0].steps == 1
    writer.join()
