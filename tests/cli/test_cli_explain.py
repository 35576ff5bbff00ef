"""`evenstep explain`, and the table that closes `evenstep train`."""

import io
import json
import re

import pytest
from rich.console import Console

from commands import complaint, run
from evenstep.cli.terminal.output import print_table, shares_table
from evenstep.profiling.accounting import DeviceShares
from traces import HandTrace


def saved(trace, folder):
    trace.trace.save(folder / "trace.json")
    return folder / "trace.json"


def slow_data(*, limit=200_000):
    trace = HandTrace("cpu:0", "cpu:1", limit=limit)
    for _ in range(10):
        trace.load(9)
        trace.add([10, 10], [10, 10], wait=9, update=0.2)
    return trace


def shares(name, *, shards=480, **parts):
    zero = dict.fromkeys(("compute_s", "sum_s", "update_s", "wait_data_s", "wait_others_s"), 0.0)
    return DeviceShares(**{"device": name, "shards": shards, "stolen": 0, **zero, **parts})


def test_a_trace_is_explained(tmp_path):
    lines = run("explain", saved(slow_data(), tmp_path)).stdout.splitlines()
    assert lines == [
        "10 steps in 0.29 s, 29.2 ms each",
        "",
        "               waiting     waiting",
        "device  busy  for data  for others  summing  updating  shards  stolen",
        "cpu:0    68%       31%          0%       0%        1%      20       0",
        "cpu:1    68%       31%          1%       0%        0%      20       0",
        "all      69%       31%          0%       0%        0%      40       0",
        "",
        "devices wait for data 31% of the time: loading takes 9.0 ms a step and one step's work "
        "20.2 ms. --in-flight 2 overlaps them",
    ]


def test_pauses_and_dropped_spans_are_reported(tmp_path):
    trace = HandTrace("cpu:0").add([10])
    trace.pause(1000)
    text = run("explain", saved(trace.add([10]), tmp_path)).stdout
    assert "; 1.00 s between them are not counted" in text
    assert "did not fit" not in text
    text = run("explain", saved(slow_data(limit=60), tmp_path)).stdout
    assert "20 older spans did not fit into the trace" in text


def test_a_page_shows_the_last_steps(tmp_path):
    file, page = saved(slow_data(), tmp_path), tmp_path / "timeline.html"
    assert run("explain", file, "--html", page).stdout == run("explain", file).stdout
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"(?:src|href)=\"(?!data:)|https?:(?!//www.w3.org)|@import|url\(", text)
    assert [int(one) for one in re.findall(r">step (\d+)<", text)] == [4, 5, 6, 7, 8, 9]
    shards = re.findall(r"<title>shard (\d+) of step (\d+): 10.00 ms</title>", text)
    assert len(shards) == len(set(shards)) == 6 * 4
    assert len(re.findall(r"<title>updating of step", text)) == 6
    rows = re.findall(r'<text x="0" y="\d+">(.+?)</text>', text)
    assert rows == ["front end", "cpu:0", "cpu:1"]
    places = [float(x) for x in re.findall(r'class="compute" x="([\d.]+)"', text)]
    assert min(places) >= 110  # behind the names
    assert max(places) < 1100
    line = complaint("explain", file, "--html", tmp_path, code=1)
    assert str(tmp_path) in line


def test_json_holds_the_same(tmp_path):
    file = saved(slow_data(), tmp_path)
    account = json.loads(run("explain", file, "--json").stdout)
    assert account["steps"] == 10
    assert [device["device"] for device in account["devices"]] == ["cpu:0", "cpu:1"]
    assert account["devices"][0]["wait_data_s"] == pytest.approx(0.09)
    (finding,) = account["findings"]
    assert finding["cause"] == "data"
    assert finding["share"] == pytest.approx(9 / 29.2)
    assert finding["text"] in run("explain", file).stdout


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "could not be read (No such file or directory)"),
        (b"", "not a trace written by evenstep: no JSON"),
        (b"\xff\xfe\x00", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"traceEvents": [', "no JSON"),
        (b"[]", "not a trace written by evenstep"),
        (b'{"traceEvents": []}', "'otherData' is missing"),
    ],
)
def test_a_bad_file_gets_one_line(tmp_path, content, part):
    file = tmp_path / "trace.json"
    if content is not None:
        file.write_bytes(content)
    line = complaint("explain", file, code=2)
    assert part in line
    assert str(file) in line
    assert "give a file that `evenstep train --trace FILE`" in line


def test_help_says_where_a_file_comes_from():
    assert "evenstep train --trace FILE" in " ".join(run("explain", "--help").stdout.split())
    assert "\n  explain " in run("--help").stdout


# --- the table


def printed(devices, *, width=200):
    """Return the lines of the table, as printed on a console of that width."""
    console = Console(file=io.StringIO(), width=width)
    print_table(console, shares_table(devices))
    return console.file.getvalue().splitlines()


def test_the_table_fits_80_columns_with_many_devices():
    devices = [
        shares(f"cpu:{number}:own", shards=1_234_567, compute_s=0.7, wait_data_s=0.3)
        for number in range(16)
    ]
    lines = printed(devices)
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[2:]] == [d.device for d in devices] + ["all"]


def test_percentages_of_a_line_add_up():
    parts = {"compute_s": 1.0, "sum_s": 1.0, "update_s": 1.0, "wait_data_s": 3.0}
    (line,) = printed([shares("cpu:0", **parts, wait_others_s=1.0)])[2:]
    percents = [int(value) for value in re.findall(r"(\d+)%", line)]
    assert len(percents) == 5
    assert sum(percents) == 100


def test_one_device_has_no_line_for_all():
    lines = printed([shares("cuda:0", compute_s=1.0)])
    assert len(lines) == 3
    assert lines[2].split() == ["cuda:0", "100%", "0%", "0%", "0%", "0%", "480", "0"]


def test_without_steps_all_is_0():
    lines = printed([shares("cpu:0", shards=0)])
    assert lines[2].split() == ["cpu:0", *["0%"] * 5, "0", "0"]


def test_a_narrow_terminal_cuts_nothing():
    devices = [shares("cpu:0", compute_s=1.0), shares("cpu:1", compute_s=1.0)]
    assert printed(devices, width=30) == printed(devices)
