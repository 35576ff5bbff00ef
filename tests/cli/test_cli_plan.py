"""`evenstep plan`, and `evenstep doctor --measure`."""

import json
import statistics
import subprocess
import sys

import pytest

from commands import MLP, complaint, run
from evenstep.planning import work_of_trace
from evenstep.recording.record_file import FORMAT, VERSION, RecordFile
from traces import HandTrace

FACTS = {"examples": 80, "gradient_nbytes": 4_000_000, "state_nbytes": 0}


def hand_trace(*devices, shard=10.0, steps=6, first=500.0, facts=FACTS):
    """Steps of 8 shards; the first two take longer."""
    trace = HandTrace(*devices)
    for step in range(steps):
        each = [first if step < 2 else shard] * (8 // len(devices))
        trace.add(*[each] * len(devices), update=4.0)
    trace.trace.facts["training"] = facts
    return trace


@pytest.fixture
def saved(tmp_path):
    def save(trace, name="one.trace"):
        trace.trace.save(tmp_path / name)
        return tmp_path / name

    return save


def test_a_trace_is_planned(saved):
    file = saved(hand_trace("cpu:0"))
    options = ("--devices", "1..3", "--per-machine", "4", "--json")
    found = json.loads(run("plan", "--trace", file, *options).stdout)
    speeds = [one["examples_per_s"] for one in found["predictions"]]
    # 8 shards of 10 ms, and 4 ms for the update
    assert speeds == pytest.approx([80 / 0.084, 80 / 0.044, 80 / 0.034], rel=1e-6)
    text = run("plan", "--trace", file, *options[:-1]).stdout
    assert "3 devices: V = 8 on 3 devices: at most 2.67 times" in text
    assert "not seen: how 3 devices of one machine slow each other down: not measured" in text
    assert "not seen: the memory of activations, which a trace does not hold" in text


def test_the_first_steps_and_incomplete_ones_are_left_out(saved):
    work = work_of_trace(saved(hand_trace("cpu:0")))
    assert work.shard_s == pytest.approx([0.01] * len(work.shard_s))
    assert len(work.shard_s) == 4 * 8
    assert (work.shards, work.examples, work.gradient_nbytes) == (8, 80, 4_000_000)
    assert work.update_s == pytest.approx(0.004)


def test_a_run_is_put_beside_the_plan(saved):
    one, two = hand_trace("cpu:0"), hand_trace("cpu:0", "cpu:1", shard=11.0)
    options = ("--trace", saved(one), "--per-machine", "2", "--devices", "1,2")
    compared = ("--compare", saved(two, "two.trace"))
    found = json.loads(run("plan", *options, *compared, "--json").stdout)["compared"]
    assert found["error"] == pytest.approx(48 / 44 - 1, abs=1e-3)
    assert found["within"]
    assert "the run on 2 devices: 1,666.7 examples/s, predicted 1,818.2 (+9.1%), inside" in (
        run("plan", *options, *compared).stdout
    )
    alone = complaint("plan", *options[:-1], "1", *compared, code=2)
    assert "add 2 to --devices" in alone


def results_of_run(**fields):
    """What `evenstep train --json` writes, as far as it matters here."""
    return json.dumps(
        {
            "devices": ["cpu:0"],
            "shards": 8,
            "batch_size": 80,
            "examples_per_second": 1600.0,
            "processes": 2,
            **fields,
        }
    )


def compared_with(saved, tmp_path, text, *more, code=None):
    """Put the plan of 2 devices of 10 ms a shard, in 2 processes, beside a run."""
    file = tmp_path / "run.json"
    file.write_text(text)
    layout = ("--devices", "1,2,4", "--per-machine", "2", "--per-process", "1", *more)
    command = ("plan", "--trace", saved(hand_trace("cpu:0")), *layout, "--compare", file, "--json")
    if code is not None:
        return complaint(*command, code=code)
    return json.loads(run(*command).stdout)["compared"]


def test_a_run_of_two_processes_is_put_beside_the_plan(saved, tmp_path):
    found = compared_with(saved, tmp_path, results_of_run())
    assert (found["devices"], found["processes"], found["measured"]) == (2, 2, 1600.0)
    # 4 shards of 10 ms, and 4 ms for the update: no time for the sum was measured
    assert found["predicted"] == pytest.approx(80 / 0.044)
    assert found["error"] == pytest.approx(80 / 0.044 / 1600 - 1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"processes": 1}, "the run had 1 device"),
        ({"processes": 3}, "add 3 to --devices"),
        ({"machines": 2}, "the run had 2 machines, and the plan for 2 devices has 1"),
        ({"processes": 2, "devices": ["cpu:0", "cpu:1"]}, "has 4: give --per-process 2"),
        ({"shards": 4}, "the run had 4 shards, and the plan has 8: give --shards 4"),
        ({"batch_size": 81}, "give --batch-size 81"),
        ({"examples_per_second": None}, "examples_per_second is None"),
        ({"examples_per_second": 0}, "examples_per_second is 0"),
        ({"examples_per_second": "fast"}, "examples_per_second is 'fast'"),
        ({"examples_per_second": [1]}, "has no results of a training"),
        ({"devices": []}, "the devices []"),
        ({"devices": 7}, "the devices 7"),
        ({"processes": 0}, "processes is 0"),
        ({"processes": 10**30}, "processes is 1000000"),
        ({"shards": 2.5}, "shards is 2.5"),
        ({"batch_size": True}, "batch_size is True"),
    ],
)
def test_a_run_that_the_plan_does_not_have_gets_one_line(saved, tmp_path, fields, said):
    more = ("--devices", "2,4") if fields == {"processes": 1} else ()
    text = results_of_run(**fields)
    assert said in compared_with(saved, tmp_path, text, *more, code=2)


NO_RUNS = ["", "{", "[]", "null", '{"a": 1}', '{"examples_per_second": 5}', "[" * 60_000, "\x00"]


@pytest.mark.parametrize("text", NO_RUNS)
def test_a_file_that_is_no_run_gets_one_line(saved, tmp_path, text):
    compared_with(saved, tmp_path, text, code=2)


def test_a_trace_of_the_first_of_two_processes_counts_both(saved):
    facts = {**FACTS, "processes": 2, "machines": 2, "shards": 8}
    half = HandTrace("cpu:0")
    for _ in range(6):
        half.add([10.0] * 4, update=10.0)
    half.trace.facts["training"] = facts
    first = saved(half, "first.trace")
    one = saved(hand_trace("cpu:0"))
    compared = ("--devices", "1,2", "--per-machine", "1", "--compare", first)
    found = json.loads(run("plan", "--trace", one, *compared, "--json").stdout)["compared"]
    assert (found["devices"], found["processes"]) == (2, 2)
    assert found["measured"] == pytest.approx(80 / 0.050)
    text = run("plan", "--trace", one, *compared).stdout
    assert "the run on 2 devices in 2 processes: 1,600.0 examples/s" in text
    said = complaint("plan", "--trace", first, code=2)
    assert "the trace of 1 device of one of 2 processes" in said


@pytest.mark.slow
def test_runs_of_two_processes_say_so(tmp_path):
    one, first, results = (tmp_path / name for name in ("one.trace", "first.trace", "two.json"))
    run("train", *MLP, "--steps", 8, "--devices", 1, "--trace", one)
    two = ("--processes", 2, "--devices", 1, "--trace", first, "--json", results)
    command = [sys.executable, "-m", "evenstep", "train", *MLP, "--steps", 8, *two]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    layout = ("--per-machine", 2, "--per-process", 1, "--devices", "1,2", "--json")
    for file in (first, results):
        found = json.loads(run("plan", "--trace", one, *layout, "--compare", file).stdout)
        assert (found["compared"]["devices"], found["compared"]["processes"]) == (2, 2)


def test_steps_in_flight_and_stages_are_not_counted_twice(saved):
    """The bar of a step in flight begins while the step before it is computed."""
    trace = HandTrace("cpu:0")
    for step in range(6):
        for shard in range(2):
            for stage, backward in ((0, False), (1, False), (1, True), (0, True)):
                story = {"step": step, "shard": shard, "stage": stage, "backward": backward}
                trace.span("cpu:0", f"shard {shard}", "compute", trace.now, 5.0, **story)
                trace.now += 5.0
        trace.span("cpu:0", f"update {step}", "update", trace.now, 2.0, step=step)
        trace.now += 3.0
        began = max(0.0, trace.now - 80.0)
        trace.span("steps", f"step {step}", "step", began, trace.now - began, step=step)
    trace.trace.facts["training"] = FACTS
    work = work_of_trace(saved(trace))
    assert work.shards == 2
    assert work.shard_s == pytest.approx([0.020] * 8)
    assert work.rest_s == pytest.approx(0.001)


@pytest.mark.parametrize("suffix", [".svg", ".png", ".html"])
def test_a_plan_is_drawn(saved, tmp_path, suffix):
    out = tmp_path / f"plan{suffix}"
    run("plan", "--trace", saved(hand_trace("cpu:0")), "--per-machine", "16", "--out", out)
    content = out.read_bytes()
    assert content.startswith({".png": b"\x89PNG", ".svg": b"<?xml", ".html": b"<!doc"}[suffix])
    if suffix == ".html":
        assert b"8 get no work" in content


def test_a_model_is_measured_and_planned():
    options = ("--batch-size", "32", "--steps", "2", "--devices", "1,2,4", "--network", "1Gbit")
    text = run("plan", "--model", "mlp", *options, "--per-machine", "2").stdout
    assert "mlp, batches of 32, V = 8" in text
    assert "not seen: several machines" in text


def test_slices_of_a_model_are_measured_and_planned():
    options = ("--batch-size", "32", "--steps", "2", "--devices", "1,2,4", "--per-machine", "4")
    found = json.loads(run("plan", "--model", "mlp", "--slices", 2, *options, "--json").stdout)
    work = found["work"]
    assert work["slices"] == 2
    # mlp has 3 linear layers; the first one has no gradient of its input to compute, but a slice
    assert work["meetings"] == 6
    assert 0 < work["sliced_s"] < sorted(work["shard_s"])[len(work["shard_s"]) // 2]
    most = 1 / (1 - work["sliced_s"] / statistics.median(work["shard_s"]) / 2)
    assert found["predictions"][1]["speed_up"] <= most


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--slices", 3), "3 slices"),
        (("--stages", 64, "--per-machine", 64, "--devices", 64), "modules with parameters"),
    ],
)
def test_what_a_model_cannot_be_cut_into_gets_one_line(options, said):
    assert said in complaint("plan", "--model", "mlp", *options, code=2)


def test_a_measured_machine_is_read_back(saved, tmp_path):
    machine = json.loads(run("doctor", "--measure", "--json").stdout)
    assert machine["machine"]["local"]["bytes_per_s"] > 1e6
    assert min(machine["machine"]["slowdown"]) >= 1.0
    file = tmp_path / "machine.json"
    machine["machine"] |= {"devices": 2, "slowdown": [1.0, 1.25]}
    file.write_text(json.dumps(machine))
    options = ("--devices", "1,2", "--machine", file, "--json")
    found = json.loads(run("plan", "--trace", saved(hand_trace("cpu:0")), *options).stdout)
    assert found["predictions"][1]["step_s"] == pytest.approx(0.04 * 1.25 + 0.004)
    assert all("which a trace does not hold" in text for text in found["unseen"])


MACHINES = ["", "[]", "{", "null", '{"machine": 3}', '{"machine": {"devices": 1e400}}']
MACHINES += ['{"machine": {"devices": 0}}', '{"machine": {"slowdown": [0.5]}}', "[" * 60_000]
MACHINES += ['{"machine": {"colour": 1}}', '{"machine": {"local": {"bytes_per_s": 0}}}']
MACHINES += ['{"machine": {"local": {"speed": 1}}}', '{"machine": {"slowdown": ["x"]}}']
MACHINES += ['{"machine": {"memory_nbytes": NaN}}', " " * 70_000, '{"machine": {"local": []}}']


@pytest.mark.parametrize("text", MACHINES)
def test_a_file_that_describes_no_machine_gets_one_line(saved, tmp_path, text):
    file = tmp_path / "machine.json"
    file.write_text(text)
    trace = saved(hand_trace("cpu:0"))
    complaint("plan", "--trace", trace, "--devices", "1", "--machine", file, code=2)


@pytest.mark.parametrize("where", ["name", "link", "value"])
def test_a_machine_file_writes_no_control_characters_to_the_terminal(saved, tmp_path, where):
    bad = "\x1b[2J\x07"
    described = {"name": {bad: 1}, "link": {"local": {bad: 1}}, "value": {"devices": bad}}[where]
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({"machine": described}))
    trace = saved(hand_trace("cpu:0"))
    said = complaint("plan", "--trace", trace, "--devices", "1", "--machine", file, code=2)
    assert said.strip().isprintable()
    assert r"\x1b[2J" in said


def test_no_machine_file_gets_one_line(tmp_path, saved):
    trace = saved(hand_trace("cpu:0"))
    said = complaint("plan", "--trace", trace, "--machine", tmp_path / "none", code=2)
    assert "evenstep doctor --measure --json" in said


def test_a_trace_of_several_devices_is_no_beginning(saved):
    said = complaint("plan", "--trace", saved(hand_trace("cpu:0", "cpu:1")), code=2)
    assert "the trace of 2 devices" in said


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"examples": 0, "gradient_nbytes": 1},
        {"examples": -5, "gradient_nbytes": 1},
        {"examples": 1.5, "gradient_nbytes": 1},
        {"examples": True, "gradient_nbytes": 1},
        {"examples": 10**30, "gradient_nbytes": 1},
        {"examples": 5},
        [],
        7,
        {"examples": 5, "gradient_nbytes": "much"},
    ],
)
def test_a_trace_that_does_not_say_what_was_trained_gets_one_line(saved, facts):
    complaint("plan", "--trace", saved(hand_trace("cpu:0", facts=facts)), code=2)


def test_traces_of_nothing_and_cut_ones_get_one_line(saved, tmp_path):
    whole = saved(hand_trace("cpu:0")).read_bytes()
    empty = hand_trace("cpu:0", steps=0)
    texts = [b"", b"{}", b"null", whole[: len(whole) // 2], whole.replace(b"shard", b"share")]
    texts += [
        whole.replace(b'"dur": ', b'"dur": -'),
        whole.replace(b'"dur": ', b'"dur": "x", "y": '),
    ]
    texts += [whole.replace(b'"cat": "update"', b'"cat": "x"')]
    texts += [b"\xff\xfe" + whole, whole.replace(b"cpu:0", b"cpu:\xff"), whole + whole]
    texts += [b'{"traceEvents": ' + b"[" * 60_000, b'{"a": "' + b"x" * 70_000 + b'"}', b"\0" * 99]
    texts += [whole.replace(b'"step": ', b'"step": 1e999, "z": '), b"[" + whole + b"]"]
    for number, text in enumerate(texts):
        file = tmp_path / f"{number}.trace"
        file.write_bytes(text)
        complaint("plan", "--trace", file, code=2)
    complaint("plan", "--trace", saved(empty, "empty.trace"), code=2)
    complaint("plan", "--trace", tmp_path / "missing.trace", code=2)
    complaint("plan", "--trace", tmp_path, code=2)


def test_a_huge_trace_is_refused_before_it_is_read(tmp_path):
    file = tmp_path / "huge.trace"
    with file.open("wb") as opened:
        opened.write(b'{"traceEvents": [')
        opened.truncate(1 << 40)  # of which the disk holds the first block
    complaint("plan", "--trace", file, code=2)


def test_a_record_holds_no_times(tmp_path):
    folder = tmp_path / "record"
    file = RecordFile(folder, rank=0, most_nbytes=1000)
    file.write({FORMAT: VERSION, "rank": 0, "world": 1})
    file.close()
    for given in (folder, folder / "process-0.jsonl"):
        said = complaint("plan", "--trace", given, code=2)
        assert "holds what was computed, and no times of shards, sums or updates" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--devices", "0"), "whole numbers"),
        (("--devices", "4..2"), "the smaller number first"),
        (("--devices", "1..x"), "such as 1..16"),
        (("--devices", "1..999999999"), "up to 100,000"),
        (("--devices", "x"), "whole numbers"),
        (("--network", "fast"), "give bits or bytes a second"),
        (("--shards", "4", "--devices", "8"), "at least 8 shards"),
        (("--shards", "100"), "at most one shard for"),
        (("--stages", "2", "--owners"), "got --stages and --owners"),
        (("--stages", "2", "--slices", "2"), "got --stages and --slices"),
        (("--slices", "2", "--owners"), "got --slices and --owners"),
        (("--slices", "2", "--in-flight", "2"), "one step in flight"),
        (("--slices", "2"), "a trace does not hold what of a shard is in slices"),
        (("--stages", "2", "--devices", "3", "--per-machine", "4"), "a multiple of 2"),
        (("--stages", "2", "--devices", "2", "--per-machine", "1"), "devices of one process"),
        (("--per-machine", "8", "--per-process", "2000"), "a process has at most 1024"),
        (("--model", "lenet"), "leave one out"),
        (("--batch-size", "2"), "at most one shard for"),
    ],
)
def test_what_cannot_be_planned_gets_one_line(saved, options, said):
    assert said in complaint("plan", "--trace", saved(hand_trace("cpu:0")), *options, code=2)


def test_many_devices_are_planned_at_powers_of_two(saved):
    options = ("--devices", "1..1000", "--shards", "80", "--json")
    found = json.loads(run("plan", "--trace", saved(hand_trace("cpu:0")), *options).stdout)
    counts = [one["arrangement"]["devices"] for one in found["predictions"]]
    assert counts == [*(2**n for n in range(10)), 1000]
